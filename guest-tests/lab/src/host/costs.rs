// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Cost tables: the elapsed time of each class of instructions on one machine.
//!
//! A TOML file contains the name of the machine and, for each class, a cost in nanoseconds and its
//! source. A missing cost is one nanosecond; missing `dc_long`, `atomic_shared`, `dsb_store` and
//! `isb` equal `dc_line`, `atomic`, `dsb` and `instruction`. The tables in `costs/` are built in.

use std::{collections::BTreeMap, fmt, fs, str::FromStr};

use granule_types::units::Nanoseconds;
use serde::{Deserialize, Serialize};

/// Classes of instructions with costs in the plugin.
const CLASSES: [&str; 14] = [
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
    "dsb_store",
    "isb",
    "exception",
];

const BUILT_IN_TABLES: [(&str, &str); 3] = [
    ("altra-vm", include_str!("../../costs/altra-vm.toml")),
    ("kunpeng920", include_str!("../../costs/kunpeng920.toml")),
    ("neoverse-n1", include_str!("../../costs/neoverse-n1.toml")),
];

/// Returns the class of a counted instruction; `None` for other counts.
fn class(name: &str) -> Option<&'static str> {
    let (kind, operation) = name.split_once(' ').unwrap_or((name, ""));
    Some(match kind {
        "TLBI" if is_broadcast(operation) => "tlbi_broadcast",
        "TLBI" => "tlbi_local",
        "DSB" if operation.ends_with("ST") => "dsb_store",
        "DSB" => "dsb",
        "ISB" => "isb",
        "DC" if operation == "ZVA" => "dc_zva",
        "DC" => "dc_line",
        "IC" if operation == "IVAU" => "ic_line",
        "IC" => "ic_all",
        _ => return None,
    })
}

/// Returns whether a `TLBI` of this name invalidates TLBs of other CPUs.
pub fn is_broadcast(operation: &str) -> bool {
    let scope = operation.strip_suffix("nXS").unwrap_or(operation);
    scope.ends_with("IS") || scope.ends_with("OS")
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CostTable {
    machine: String,
    /// Picoseconds by class.
    picoseconds: BTreeMap<String, u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CostFile {
    machine: String,
    costs: BTreeMap<String, InstructionCost>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct InstructionCost {
    ns: f64,
    source: String,
}

impl FromStr for CostTable {
    type Err = String;

    /// Returns the built-in table `name`, or reads the file `name`.
    fn from_str(name: &str) -> Result<Self, String> {
        let known = BUILT_IN_TABLES.iter().find(|(known, _)| *known == name);
        match known {
            Some((_, text)) => Self::parse(text),
            None => fs::read_to_string(name)
                .map_err(|error| {
                    let known: Vec<&str> = BUILT_IN_TABLES.iter().map(|(name, _)| *name).collect();
                    format!("no table or readable file: {error}; tables: {}", known.join(", "))
                })
                .and_then(|text| Self::parse(&text)),
        }
    }
}

impl CostTable {
    fn parse(text: &str) -> Result<Self, String> {
        let CostFile { machine, costs } = toml::from_str(text).map_err(|e| e.to_string())?;
        let mut picoseconds = BTreeMap::new();
        for (class, InstructionCost { ns, source }) in costs {
            if !CLASSES.contains(&class.as_str()) {
                return Err(format!("unknown class '{class}': expected {}", CLASSES.join(", ")));
            }
            if !(0.0..=1e9).contains(&ns) || source.trim().is_empty() {
                return Err(format!("{class} requires a cost of at most 1e9 ns and a source"));
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

    /// Returns the time of one CPU that executes these counted instructions, one after the other: a
    /// model. `instructions` are all of them; those that no count names cost as any other.
    pub fn model(&self, counts: &BTreeMap<String, u64>) -> Nanoseconds {
        let known = |class: &str| self.picoseconds.get(class).copied();
        let cost = |class: &str| {
            let other = match class {
                "dsb_store" => known("dsb"),
                "isb" => known("instruction"),
                _ => None,
            };
            known(class).or(other).unwrap_or(1000)
        };
        let classes = counts.iter().filter_map(|(name, count)| Some((class(name)?, *count)));
        let classes: Vec<(&str, u64)> = classes.collect();
        let named: u64 = classes.iter().map(|(_, count)| count).sum();
        let all = counts.get("instructions").copied().unwrap_or(0);
        let others = all.saturating_sub(named) * cost("instruction");
        let named: u64 = classes.iter().map(|(class, count)| cost(class) * count).sum();
        Nanoseconds((others + named) / 1000)
    }

    /// Returns the name of the machine.
    pub fn machine(&self) -> &str {
        &self.machine
    }

    pub fn plugin_arguments(&self) -> String {
        let cost = |(class, cost): (&String, &u64)| format!(",cost={class}:{cost}");
        self.picoseconds.iter().map(cost).collect()
    }
}

impl fmt::Display for CostTable {
    /// Formats the machine and every cost for the records, because results with different costs are
    /// not comparable.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let costs = self.picoseconds.iter().map(|(class, cost)| format!("{class}={cost}ps"));
        write!(f, "costs of {} ({})", self.machine, costs.collect::<Vec<_>>().join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_tables_have_a_cost_for_each_class() {
        for (name, _) in BUILT_IN_TABLES {
            let costs: CostTable = name.parse().unwrap();

            let without_cost =
                CLASSES.iter().filter(|class| !costs.picoseconds.contains_key(**class));
            for class in without_cost {
                assert!(
                    ["atomic_shared", "dc_long", "dsb_store", "isb"].contains(class),
                    "{name}: {class}"
                );
            }
        }
    }

    #[test]
    fn costs_are_formatted_as_plugin_arguments() {
        let text = "machine = \"M\"\n[costs]\ndsb = { ns = 0.25, source = \"estimate\" }\n";

        let costs = CostTable::parse(text).unwrap();

        assert_eq!(costs.plugin_arguments(), ",cost=dsb:250");
        assert_eq!(costs.to_string(), "costs of M (dsb=250ps)");
    }

    #[test]
    fn a_model_is_the_sum_of_counts_by_their_costs() {
        let text = "machine = \"M\"\n[costs]\n\
                    instruction = { ns = 0.5, source = \"s\" }\n\
                    tlbi_broadcast = { ns = 200, source = \"s\" }\n\
                    tlbi_local = { ns = 10, source = \"s\" }\n\
                    dsb = { ns = 100, source = \"s\" }\n";
        let costs = CostTable::parse(text).unwrap();
        let counts = [
            ("instructions", 1006),
            ("stores", 500),
            ("TLBI VAALE1IS", 2),
            ("TLBI VMALLE1", 1),
            ("DSB ISH", 2),
            ("DSB ISHST", 1),
        ];
        let counts = counts.map(|(name, count)| (name.to_owned(), count)).into();

        assert_eq!(costs.model(&counts), Nanoseconds(500 + 400 + 10 + 300));
        let text = format!("{text}dsb_store = {{ ns = 16, source = \"s\" }}\n");
        let costs = CostTable::parse(&text).unwrap();
        assert_eq!(costs.model(&counts), Nanoseconds(500 + 400 + 10 + 200 + 16));
    }

    #[test]
    fn a_table_without_sources_or_with_unknown_classes_is_refused() {
        for (cost, reason) in [
            ("dsb = { ns = 1, source = \"\" }", "source"),
            ("dsb = { ns = -1, source = \"s\" }", "at most"),
            ("dsc = { ns = 1, source = \"s\" }", "unknown class"),
            ("dsb = { ns = 1 }", "source"),
        ] {
            let error =
                CostTable::parse(&format!("machine = \"M\"\n[costs]\n{cost}\n")).unwrap_err();

            assert!(error.contains(reason), "{error}");
        }
        assert!("/no/such/table".parse::<CostTable>().unwrap_err().contains("kunpeng920"));
    }
}
