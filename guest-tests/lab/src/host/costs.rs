// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Cost tables: the elapsed time of instructions by class, for one machine each.
//!
//! A table is a TOML file with the name of the machine and, for each class of the plugin, a cost in
//! nanoseconds and its source. The default is one nanosecond; for a line of a long range and for a
//! shared atomic operation, it is the cost of any other line or atomic operation. The tables in
//! `costs/` are built in; an option names one of them or a file.

use std::{collections::BTreeMap, fmt, fs, str::FromStr};

use serde::Deserialize;

/// Classes of instructions that the plugin distinguishes.
const CLASSES: [&str; 12] = [
    "instruction",
    "atomic",
    "atomic_shared",
    "dc_line",
    "dc_long",
    "dc_zva",
    "ic_line",
    "ic_all",
    "tlbi_local",
    "tlbi_broadcast",
    "dsb",
    "exception",
];

/// Built-in tables.
const KNOWN: [(&str, &str); 2] = [
    ("kunpeng920", include_str!("../../costs/kunpeng920.toml")),
    ("neoverse-n1", include_str!("../../costs/neoverse-n1.toml")),
];

/// Cost table of one machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Costs {
    machine: String,
    /// Picoseconds by class.
    picoseconds: BTreeMap<String, u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    machine: String,
    costs: BTreeMap<String, Cost>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Cost {
    ns: f64,
    source: String,
}

impl FromStr for Costs {
    type Err = String;

    /// Returns the built-in table of this name, or reads the table from this file.
    fn from_str(name: &str) -> Result<Self, String> {
        let known = KNOWN.iter().find(|(known, _)| *known == name);
        match known {
            Some((_, text)) => Self::parse(text),
            None => fs::read_to_string(name)
                .map_err(|error| {
                    let known: Vec<&str> = KNOWN.iter().map(|(name, _)| *name).collect();
                    format!("no table or readable file: {error}; tables: {}", known.join(", "))
                })
                .and_then(|text| Self::parse(&text)),
        }
    }
}

impl Costs {
    fn parse(text: &str) -> Result<Self, String> {
        let Table { machine, costs } = toml::from_str(text).map_err(|error| error.to_string())?;
        let mut picoseconds = BTreeMap::new();
        for (class, Cost { ns, source }) in costs {
            if !CLASSES.contains(&class.as_str()) {
                return Err(format!("unknown class '{class}': expected {}", CLASSES.join(", ")));
            }
            if !(0.0..=1e9).contains(&ns) || source.trim().is_empty() {
                return Err(format!("{class} needs a cost of at most 1e9 ns and a source"));
            }
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "in range"
            )]
            picoseconds.insert(class, (ns * 1000.0).round() as u64);
        }
        Ok(Self { machine, picoseconds })
    }

    /// Formats the costs as arguments of the plugin.
    pub fn arguments(&self) -> String {
        let cost = |(class, cost): (&String, &u64)| format!(",cost={class}:{cost}");
        self.picoseconds.iter().map(cost).collect()
    }
}

impl fmt::Display for Costs {
    /// Formats the machine and every cost for the records: results with different costs are not
    /// comparable.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let costs = self.picoseconds.iter().map(|(class, cost)| format!("{class}={cost}ps"));
        write!(f, "costs of {} ({})", self.machine, costs.collect::<Vec<_>>().join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_of_the_program_have_a_cost_for_each_class() {
        for (name, _) in KNOWN {
            let costs: Costs = name.parse().unwrap();

            let missing = CLASSES.iter().filter(|class| !costs.picoseconds.contains_key(**class));
            for class in missing {
                assert!(["atomic_shared", "dc_long"].contains(class), "{name}: {class}");
            }
        }
    }

    #[test]
    fn costs_become_arguments_of_the_plugin() {
        let text = "machine = \"M\"\n[costs]\ndsb = { ns = 0.25, source = \"estimate\" }\n";

        let costs = Costs::parse(text).unwrap();

        assert_eq!(costs.arguments(), ",cost=dsb:250");
        assert_eq!(costs.to_string(), "costs of M (dsb=250ps)");
    }

    #[test]
    fn a_table_without_sources_or_with_unknown_classes_is_refused() {
        for (cost, reason) in [
            ("dsb = { ns = 1, source = \"\" }", "source"),
            ("dsb = { ns = -1, source = \"s\" }", "at most"),
            ("dsc = { ns = 1, source = \"s\" }", "unknown class"),
            ("dsb = { ns = 1 }", "source"),
        ] {
            let error = Costs::parse(&format!("machine = \"M\"\n[costs]\n{cost}\n")).unwrap_err();

            assert!(error.contains(reason), "{error}");
        }
        assert!("/no/such/table".parse::<Costs>().unwrap_err().contains("kunpeng920"));
    }
}
