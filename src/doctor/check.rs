// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Results of the checks, and their text and JSON.

use clap::ValueEnum;
use serde::Serialize;

/// Task that the machine is checked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Group {
    /// `granule run`, `granule bench` and `granule advise` on this machine's KVM
    Kvm,
    /// `granule lab`, which emulates its host
    Lab,
}

impl Group {
    const fn title(self) -> &'static str {
        match self {
            Self::Kvm => "granule run and bench (KVM)",
            Self::Lab => "granule lab (emulation)",
        }
    }
}

/// Status of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Present.
    Ok,
    /// Absent or limited; the task works without it.
    Warn,
    /// Absent; the task needs it.
    Missing,
}

impl Status {
    const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Missing => "missing",
        }
    }
}

/// Result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    pub group: Group,
    pub name: String,
    pub status: Status,
    pub found: String,
    /// Remedy; `None` if none is needed or `found` contains it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
    /// Package that provides the missing tool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub package: Option<String>,
}

impl Check {
    pub fn new(
        group: Group,
        name: impl Into<String>,
        status: Status,
        found: impl Into<String>,
    ) -> Self {
        let (name, found) = (name.into(), found.into());
        Self { group, name, status, found, remedy: None, package: None }
    }

    pub fn with_remedy(self, remedy: impl Into<String>) -> Self {
        Self { remedy: Some(remedy.into()), ..self }
    }
}

/// Results of all checks.
#[derive(Debug, PartialEq, Eq)]
pub struct Report {
    pub groups: Vec<Group>,
    pub checks: Vec<Check>,
    /// Command that installs packages.
    pub install: &'static str,
}

impl Report {
    /// Returns whether a group lacks nothing that it needs.
    fn is_usable(&self, group: Group) -> bool {
        !self.checks.iter().any(|check| check.group == group && check.status == Status::Missing)
    }

    /// Returns whether at least one of the checked groups is usable.
    pub fn passed(&self) -> bool {
        self.groups.iter().any(|&group| self.is_usable(group))
    }

    /// Formats one line for each check, and one command that installs all missing packages.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for &group in &self.groups {
            let usable = if self.is_usable(group) { "usable" } else { "not usable" };
            text += &format!("{}: {usable}\n", group.title());
            let checks = || self.checks.iter().filter(|check| check.group == group);
            let width = checks().map(|check| check.name.len()).max().unwrap_or(0);
            for Check { name, status, found, remedy, .. } in checks() {
                let remedy = remedy.as_ref().map(|remedy| format!("; {remedy}"));
                let remedy = remedy.unwrap_or_default();
                text += &format!("  {:<7}  {name:<width$}  {found}{remedy}\n", status.name());
            }
        }
        let packages = self.missing_packages();
        if !packages.is_empty() {
            text += &format!("To install what is needed: {} {packages}\n", self.install);
        }
        text
    }

    fn missing_packages(&self) -> String {
        let needed = self.checks.iter().filter(|check| check.status == Status::Missing);
        let mut packages: Vec<_> = needed.filter_map(|check| check.package.as_deref()).collect();
        packages.sort_unstable();
        packages.dedup();
        packages.join(" ")
    }

    /// Formats the report as JSON.
    ///
    /// # Errors
    /// The JSON writer fails, which is not expected.
    pub fn json(&self) -> serde_json::Result<String> {
        #[derive(Serialize)]
        struct Document<'a> {
            schema: &'static str,
            usable: Vec<Group>,
            checks: &'a [Check],
        }
        let usable = self.groups.iter().copied().filter(|&group| self.is_usable(group)).collect();
        let document = Document { schema: "granule.doctor/1", usable, checks: &self.checks };
        Ok(serde_json::to_string_pretty(&document)? + "\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let missing = Check::new(Group::Lab, "flex", Status::Missing, "not found");
        Report {
            groups: vec![Group::Kvm, Group::Lab],
            checks: vec![
                Check::new(Group::Kvm, "THP", Status::Warn, "never").with_remedy("enable it"),
                Check { package: Some("flex".to_owned()), ..missing },
                Check::new(Group::Lab, "make", Status::Ok, "/usr/bin/make"),
            ],
            install: "sudo apt-get install",
        }
    }

    #[test]
    fn one_usable_group_passes_and_each_alone_decides_for_itself() {
        let alone = |group| Report { groups: vec![group], ..report() };

        assert!(report().passed());
        assert!(alone(Group::Kvm).passed());
        assert!(!alone(Group::Lab).passed());
    }

    #[test]
    fn the_text_has_one_line_for_each_check_and_the_install_command() {
        assert_eq!(
            report().text(),
            "granule run and bench (KVM): usable\n\
             \x20 warn     THP  never; enable it\n\
             granule lab (emulation): not usable\n\
             \x20 missing  flex  not found\n\
             \x20 ok       make  /usr/bin/make\n\
             To install what is needed: sudo apt-get install flex\n"
        );
    }

    #[test]
    fn the_json_names_usable_groups_and_every_check() {
        let json: serde_json::Value = serde_json::from_str(&report().json().unwrap()).unwrap();

        assert_eq!(json["schema"], "granule.doctor/1");
        assert_eq!(json["usable"], serde_json::json!(["kvm"]));
        assert_eq!(json["checks"][1]["status"], "missing");
        assert_eq!(json["checks"][1]["package"], "flex");
    }
}
