// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Findings of one job as records: the file `defects.jsonl`, a summary and one line for each defect.

use std::{fs, path::Path};

use granule_stage2::check::machine::{CheckedTables, Finding, Totals, TranslatedAddress};
use serde::{Deserialize, Serialize};

use super::{
    history::describe,
    setup::{Setup, Unapplied},
};
use crate::command::CommandError;

const SCHEMA: &str = "granule.defects/1";
/// Functions of a call chain that identify a defect: more would repeat it for each caller.
const IDENTIFYING_FUNCTIONS: usize = 4;

/// Findings of one job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checked {
    pub summary: Summary,
    pub defects: Vec<Defect>,
}

/// Numbers that describe an observation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    schema: String,
    /// Reason for which events are missing.
    pub error: Option<String>,
    pub events: u64,
    /// Guests that were checked.
    pub guests: u64,
    /// Guests whose tables cannot be checked: reserved geometry.
    pub unsupported_guests: u64,
    /// Tables of the host itself, which are not checked.
    pub host_tables: u64,
    /// Tables of nested guests, which are not checked.
    pub nested_tables: u64,
    /// The most leaves that a guest has had at once.
    #[serde(default)]
    pub most_leaves: u64,
    /// The most TLB entries that contiguous runs saved at once.
    #[serde(default)]
    pub saved_tlb_entries: u64,
    /// Stores to tables.
    pub stores: u64,
    /// Stores to the kernel's own tables.
    #[serde(skip_serializing_if = "is_zero", default)]
    pub kernel_stores: u64,
    pub unapplied: Vec<Unapplied>,
    /// Observed functions that the kernel lacks.
    pub missing: Vec<String>,
}

/// A violated rule and its place in the kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Defect {
    pub rule: String,
    /// Number of violations.
    pub count: u64,
    /// The first violation.
    pub detail: String,
    pub cpu: u8,
    /// Number of the violating event, counted from 0.
    pub event: u64,
    pub vmid: u16,
    /// Address of the root table.
    #[serde(with = "hexadecimal")]
    pub root: u64,
    /// Indicates the kernel's own tables; otherwise those of a guest.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub is_kernel: bool,
    /// Last change of these tables by this CPU.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub change: Option<Change>,
    /// Call chain of the first violation, from the innermost function on.
    pub chain: Vec<Frame>,
    /// Events that led to the first violation; the last one violates the rule.
    pub history: Vec<Step>,
}

/// A change of an entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// First address that the entry translates: of the guest, or of the kernel.
    #[serde(with = "hexadecimal")]
    pub ipa: u64,
    pub level: u8,
    #[serde(with = "hexadecimal")]
    pub old: u64,
    #[serde(with = "hexadecimal")]
    pub new: u64,
}

/// A function of a call chain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frame {
    #[serde(with = "hexadecimal")]
    pub address: u64,
    /// Function, offset, and file with line if known.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub place: Option<String>,
}

/// An event of a history.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    pub event: u64,
    pub cpu: u8,
    pub text: String,
    /// Innermost function, if known.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub place: Option<String>,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

mod hexadecimal {
    //! Addresses as text: a number of JSON may have 53 bits only.

    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(address: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&format!("{address:#x}"))
    }

    pub fn deserialize<'a, D: Deserializer<'a>>(deserializer: D) -> Result<u64, D::Error> {
        let text = String::deserialize(deserializer)?;
        u64::from_str_radix(text.trim_start_matches("0x"), 16).map_err(D::Error::custom)
    }
}

impl Frame {
    /// Returns the name of the function.
    pub fn function(&self) -> Option<&str> {
        let name = self.place.as_ref()?.split([' ', '+']).next()?;
        (!name.is_empty()).then_some(name)
    }

    /// Returns file and line of the instruction, if known.
    pub fn line(&self) -> Option<(&str, u32)> {
        let (_, line) = self.place.as_ref()?.split_once(' ')?;
        let (file, line) = line.rsplit_once(':')?;
        Some((file, line.parse().ok()?))
    }
}

impl Defect {
    /// Returns the names of the functions of the call chain; a function that calls itself occurs
    /// once.
    pub fn functions(&self) -> Vec<String> {
        let name = |frame: &Frame| {
            frame.function().map_or_else(|| format!("{:#x}", frame.address), str::to_owned)
        };
        let mut names: Vec<String> = self.chain.iter().map(name).collect();
        names.dedup();
        names
    }

    /// Returns the properties that the same defect has in all jobs.
    pub fn identity(&self) -> (String, Vec<String>) {
        let functions = self.functions().into_iter().take(IDENTIFYING_FUNCTIONS).collect();
        (self.rule.clone(), functions)
    }
}

impl Checked {
    /// Returns the findings of an observer. `place` describes the place of an instruction, and
    /// `stack` the innermost one of a stack by its number.
    pub fn new(
        (totals, findings): (Totals, &[&Finding]),
        setup: &Setup,
        error: Option<String>,
        place: impl Fn(u64) -> Option<String>,
        innermost: impl Fn(u32) -> Option<u64>,
    ) -> Self {
        let defect = |finding: &&Finding| Defect {
            rule: finding.rule.to_string(),
            count: finding.count,
            detail: finding.detail.clone(),
            cpu: finding.cpu,
            event: finding.event,
            vmid: match finding.tables {
                CheckedTables::Guest(_, vmid) => vmid.0,
                CheckedTables::Kernel(_) => 0,
            },
            root: match finding.tables {
                CheckedTables::Guest(root, _) | CheckedTables::Kernel(root) => root.0,
            },
            is_kernel: matches!(finding.tables, CheckedTables::Kernel(_)),
            change: finding.change.map(|change| Change {
                ipa: match change.address {
                    TranslatedAddress::Guest(ipa) => ipa.0,
                    TranslatedAddress::Kernel(address) => address.0 | 0xff << 56,
                },
                level: change.level.number(),
                old: change.old,
                new: change.new,
            }),
            chain: finding
                .stack
                .iter()
                .map(|address| Frame { address: *address, place: place(*address) })
                .collect(),
            history: finding
                .history
                .iter()
                .map(|(index, event)| Step {
                    event: *index,
                    cpu: event.cpu,
                    text: describe(&event.action, setup),
                    place: event.stack.and_then(&innermost).and_then(&place),
                })
                .collect(),
        };
        let error = error.or_else(|| gap(&totals));
        Self {
            summary: Summary {
                schema: SCHEMA.to_owned(),
                error,
                events: totals.events,
                guests: totals.guests,
                unsupported_guests: totals.unsupported,
                host_tables: totals.host,
                nested_tables: totals.shadows,
                most_leaves: totals.most_leaves.leaves,
                saved_tlb_entries: totals.most_leaves.saved,
                stores: totals.stores,
                kernel_stores: totals.kernel_stores,
                unapplied: setup.unapplied.clone(),
                missing: setup.missing.clone(),
            },
            defects: findings.iter().map(defect).collect(),
        }
    }

    /// Reads the file of a job.
    ///
    /// # Errors
    /// The file cannot be read, or another version of granule wrote it.
    pub fn read(path: &Path) -> Result<Self, CommandError> {
        let failed = |error| CommandError::file("read", path, error);
        let text = fs::read_to_string(path).map_err(failed)?;
        let mut lines = text.lines();
        let parse = |error: serde_json::Error| failed(error.into());
        let summary = serde_json::from_str(lines.next().unwrap_or_default()).map_err(parse)?;
        let defects = lines.map(serde_json::from_str).collect::<Result<_, _>>().map_err(parse)?;
        Ok(Self { summary, defects })
    }

    /// Writes the file of a job.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), CommandError> {
        let text = || {
            let mut text = serde_json::to_string(&self.summary)? + "\n";
            for defect in &self.defects {
                text += &(serde_json::to_string(defect)? + "\n");
            }
            Ok::<_, serde_json::Error>(text)
        };
        let text = text().map_err(std::io::Error::from);
        text.and_then(|text| fs::write(path, text))
            .map_err(|error| CommandError::file("write", path, error))
    }
}

/// Returns the reason for which the findings cannot be trusted, if the trace lacks changes of tables,
/// or calls of functions or their ends.
fn gap(totals: &Totals) -> Option<String> {
    let Totals { unknown_tables: tables, unexpected_values: stores, .. } = totals;
    let calls = totals.unbalanced_calls;
    (tables + stores + calls > 0).then(|| {
        format!(
            "findings may be wrong or missing: contents of {tables} tables, {stores} earlier stores, \
             and {calls} calls or their ends are not in the trace"
        )
    })
}

#[cfg(test)]
pub mod tests {
    use super::*;

    #[test]
    fn a_trace_without_all_changes_is_an_error() {
        assert_eq!(gap(&Totals { events: 1, ..Totals::default() }), None);
        let reason = gap(&Totals { unexpected_values: 3, ..Totals::default() }).unwrap();
        assert!(reason.contains("0 tables, 3 earlier stores, and 0 calls"), "{reason}");
        let reason = gap(&Totals { unbalanced_calls: 1, ..Totals::default() }).unwrap();
        assert!(reason.contains("and 1 calls"), "{reason}");
    }

    /// Returns a defect with this rule and call chain.
    pub fn defect(rule: &str, functions: &[&str]) -> Defect {
        let frame = |function: &&str| Frame {
            address: 0xffff_8000_1000_0000,
            place: Some(format!("{function}+0x94 arch/arm64/kvm/mmu.c:512")),
        };
        let step = Step { event: 41, cpu: 1, text: "DSB ISHST".to_owned(), place: None };
        Defect {
            rule: rule.to_owned(),
            count: 2,
            detail: "0x4000 is not clean".to_owned(),
            cpu: 1,
            event: 42,
            vmid: 3,
            root: 0x4118_0000,
            is_kernel: false,
            change: Some(Change { ipa: 0x4000, level: 3, old: 0, new: 0x0040_0000_41a0_0fff }),
            chain: functions.iter().map(frame).collect(),
            history: vec![step],
        }
    }

    /// Returns the result of a job with these defects.
    pub fn checked(defects: Vec<Defect>) -> Checked {
        let summary = Summary {
            schema: SCHEMA.to_owned(),
            error: None,
            events: 1000,
            guests: 1,
            unsupported_guests: 0,
            host_tables: 0,
            nested_tables: 0,
            most_leaves: 48,
            saved_tlb_entries: 30,
            stores: 10,
            kernel_stores: 0,
            unapplied: Vec::new(),
            missing: vec!["hva_to_pfn".to_owned()],
        };
        Checked { summary, defects }
    }

    #[test]
    fn a_file_is_read_as_written() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let written = checked(vec![defect("break-before-make", &["a", "b"])]);

        written.write(file.path()).unwrap();

        assert_eq!(Checked::read(file.path()).unwrap(), written);
    }

    #[test]
    fn recursion_and_callers_do_not_distinguish_defects() {
        let one = defect("break-before-make", &["leaf", "walk", "walk", "map", "abort", "run"]);
        let other = defect("break-before-make", &["leaf", "walk", "map", "abort", "other"]);

        assert_eq!(one.identity(), other.identity());
        assert_eq!(one.chain[0].line(), Some(("arch/arm64/kvm/mmu.c", 512)));
    }
}
