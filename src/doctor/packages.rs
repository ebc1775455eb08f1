// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tools of the lab and their packages by distribution, from `scripts/packages`.

/// Table of tools and packages, which `scripts/setup` reads too.
const TABLE: &str = include_str!("../../scripts/packages");

/// Distribution with package names in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Distribution {
    Debian,
    Ubuntu,
    Fedora,
    Arch,
}

impl Distribution {
    /// Distributions by their `ID` in `os-release`, in the order of the table's columns.
    const ALL: [(&str, Self); 4] = [
        ("debian", Self::Debian),
        ("ubuntu", Self::Ubuntu),
        ("fedora", Self::Fedora),
        ("arch", Self::Arch),
    ];

    /// Returns the distribution that the text of `os-release` names as itself or as a relative, the
    /// closest first.
    pub fn of_os_release(text: &str) -> Option<Self> {
        let value = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
            line.unwrap_or_default().trim_matches(['"', '\'']).to_owned()
        };
        let names = format!("{} {}", value("ID"), value("ID_LIKE"));
        names.split_ascii_whitespace().find_map(|name| {
            Self::ALL.into_iter().find(|(id, _)| *id == name).map(|(_, distribution)| distribution)
        })
    }

    /// Returns the command that installs packages.
    pub const fn install_command(self) -> &'static str {
        match self {
            Self::Debian | Self::Ubuntu => "sudo apt-get install",
            Self::Fedora => "sudo dnf install",
            Self::Arch => "sudo pacman -S",
        }
    }
}

/// Tool of the lab.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tool {
    /// Program in `PATH`, or absolute path.
    pub probe: &'static str,
    pub is_required: bool,
    pub package: &'static str,
    pub purpose: &'static str,
}

/// Returns the tools of a group of the table that the distribution packages. `is_arm64` is the
/// architecture of the machine.
pub fn tools(group: &str, distribution: Distribution, is_arm64: bool) -> Vec<Tool> {
    parse(TABLE, group, distribution, is_arm64)
}

fn parse(
    table: &'static str,
    group: &str,
    distribution: Distribution,
    is_arm64: bool,
) -> Vec<Tool> {
    let rows = table.lines().filter(|line| !line.starts_with('#'));
    rows.filter_map(|line| {
        let (columns, purpose) = split_columns(line)?;
        let [row_group, need, machine, probe, packages @ ..] = columns;
        let column = Distribution::ALL.iter().position(|(_, other)| *other == distribution)?;
        let package = packages[column];
        let applies = row_group == group && package != "-" && (machine != "cross" || !is_arm64);
        applies.then_some(Tool { probe, is_required: need == "yes", package, purpose })
    })
    .collect()
}

/// Splits a row into its eight columns of one word each and the purpose.
fn split_columns(line: &'static str) -> Option<([&'static str; 8], &'static str)> {
    let mut rest = line.trim();
    let mut columns = [""; 8];
    for column in &mut columns {
        let (word, after) = rest.split_once(|c: char| c.is_ascii_whitespace())?;
        *column = word;
        rest = after.trim_start();
    }
    Some((columns, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distributions_are_found_by_name_and_by_relation() {
        for (text, expected) in [
            ("NAME=x\nID=debian\n", Some(Distribution::Debian)),
            ("ID=ubuntu\nID_LIKE=debian\n", Some(Distribution::Ubuntu)),
            ("ID=linuxmint\nID_LIKE=\"ubuntu debian\"\n", Some(Distribution::Ubuntu)),
            ("ID=\"rocky\"\nID_LIKE=\"rhel centos fedora\"\n", Some(Distribution::Fedora)),
            ("ID=arch\n", Some(Distribution::Arch)),
            ("ID=nixos\n", None),
            ("", None),
        ] {
            assert_eq!(Distribution::of_os_release(text), expected, "{text}");
        }
    }

    #[test]
    fn every_row_of_the_table_has_all_columns_and_known_values() {
        let rows: Vec<_> = TABLE.lines().filter(|line| !line.starts_with('#')).collect();

        assert!(rows.len() > 20);
        for row in rows {
            let (columns, purpose) = split_columns(row).unwrap_or_else(|| panic!("{row}"));
            assert!(["lab", "dev"].contains(&columns[0]), "{row}");
            assert!(["yes", "no"].contains(&columns[1]), "{row}");
            assert!(["any", "cross"].contains(&columns[2]), "{row}");
            assert!(!purpose.is_empty(), "{row}");
        }
    }

    #[test]
    fn an_arm64_machine_needs_no_cross_compiler() {
        let probes = |is_arm64| {
            let tools = tools("lab", Distribution::Debian, is_arm64);
            tools.into_iter().map(|tool| tool.probe).collect::<Vec<_>>()
        };

        assert!(probes(false).contains(&"aarch64-linux-gnu-gcc"));
        assert!(!probes(true).contains(&"aarch64-linux-gnu-gcc"));
        assert!(probes(true).contains(&"qemu-system-aarch64"));
    }

    #[test]
    fn a_tool_without_a_package_in_the_distribution_is_left_out() {
        let table = "lab yes any /lib/a.h  a-dev -  a-devel -  headers of a\n\
                     lab no  any b         b     b  -       b  tool b\n";
        let tools = |distribution| parse(table, "lab", distribution, false);

        let fedora = Tool {
            probe: "/lib/a.h",
            is_required: true,
            package: "a-devel",
            purpose: "headers of a",
        };
        assert_eq!(tools(Distribution::Fedora), [fedora]);
        assert_eq!(tools(Distribution::Ubuntu).len(), 1);
        assert!(!tools(Distribution::Arch)[0].is_required);
    }
}
