// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A line of a ledger, `granule.ledger/1`: one kernel, the inputs of its measurement, and figures.
//!
//! The format is stable: fields are added, never removed or redefined. Equal inputs produce equal
//! lines, which contain neither the time of a run nor paths of its machine.

use std::collections::BTreeMap;

use granule_types::{
    backing::Backing,
    phase::Phase,
    record::{EventCounts, Record},
    units::{Bytes, Nanoseconds},
};
use serde::{Deserialize, Serialize};

use super::release::Release;

/// Identifier of the format, in every line.
pub const SCHEMA: &str = "granule.ledger/1";

/// Sums of the plugin's counts over all instructions of a family.
const FAMILIES: [(&str, &str); 3] = [("DC CIVAC", "DC CIVAC"), ("IC", "IC "), ("TLBI", "TLBI ")];
/// Counted function that is no property of the fault path.
const TIMER_TICKS: &str = "timer_ticks";

/// One kernel of a ledger.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    pub schema: String,
    /// Revision or version, as given on the command line.
    pub revision: String,
    #[serde(flatten)]
    pub origin: Origin,
    pub linux: Release,
    #[serde(flatten)]
    pub key: Key,
    /// Version of Granule, for readers; `program` identifies the programs.
    pub granule: String,
    /// SHA-256 of the image; absent if the kernel does not build.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_sha256: Option<String>,
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// Origin of a kernel's source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// Hash of a commit.
    Commit(String),
    /// Name and version of a source package.
    Package(String),
}

/// Inputs of a measurement. A key that a ledger contains is not measured again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Key {
    /// Name of the fixed matrix.
    pub matrix: String,
    /// Git tree of the source.
    pub tree: String,
    /// Compiler and linker.
    pub compiler: String,
    /// Hash of configuration fragments and variables of `make`.
    pub configuration: String,
    /// Emulator with its version.
    pub emulator: String,
    /// Options of the emulated hosts, in the order of the matrix.
    pub machines: Vec<String>,
    /// Hash of the arm64 `granule` and the counting plugin.
    pub program: String,
}

impl Key {
    /// Reports whether the figures of both differ by the source only.
    pub fn has_same_setup(&self, other: &Self) -> bool {
        let Self { tree: _, matrix, compiler, configuration, emulator, machines, program } = self;
        (matrix, compiler, configuration) == (&other.matrix, &other.compiler, &other.configuration)
            && (emulator, machines, program) == (&other.emulator, &other.machines, &other.program)
    }
}

/// Figures of a kernel, or the reason why it has none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Figures of each configuration of the matrix, in its order.
    Results(Vec<ConfigurationFigures>),
    /// The kernel does not build or boot, or a job failed.
    Failure(String),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfigurationFigures {
    pub backing: Backing,
    pub memory: Bytes,
    pub vcpus: u32,
    /// Phases, in the order of an iteration.
    pub phases: Vec<PhaseFigures>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhaseFigures {
    pub phase: Phase,
    /// Virtual time that the CPUs would take in parallel.
    pub elapsed_ns: Nanoseconds,
    /// Virtual time, summed over all CPUs.
    pub work_ns: Nanoseconds,
    /// Counts by name; a count that this kernel does not provide is absent.
    pub counts: EventCounts,
}

impl Line {
    pub const fn is_measured(&self) -> bool {
        matches!(self.outcome, Outcome::Results(_))
    }
}

impl ConfigurationFigures {
    /// Formats the configuration: `anonymous, 16M, 4 vCPUs`.
    pub fn title(&self) -> String {
        format!("{}, {}, {} vCPUs", self.backing, self.memory, self.vcpus)
    }

    /// Reports whether both are results of the same configuration.
    pub fn is_same(&self, other: &Self) -> bool {
        (self.backing, self.memory, self.vcpus) == (other.backing, other.memory, other.vcpus)
    }
}

/// Groups the records of a kernel by configuration. `functions` are the functions whose calls the
/// plugin counted; the plugin omits a count that is zero.
pub fn figures(records: &[Record], functions: &[(String, u64)]) -> Vec<ConfigurationFigures> {
    let mut found: Vec<ConfigurationFigures> = Vec::new();
    for record in records {
        let (backing, memory, vcpus) =
            (record.config.backing, record.config.memory, record.config.vcpus);
        let of = ConfigurationFigures { backing, memory, vcpus, phases: Vec::new() };
        if !found.last().is_some_and(|last| last.is_same(&of)) {
            found.push(of);
        }
        if let Some(last) = found.last_mut() {
            last.phases.push(PhaseFigures {
                phase: record.phase,
                elapsed_ns: record.elapsed_ns.unwrap_or(record.ns),
                work_ns: record.ns,
                counts: counts(record, functions),
            });
        }
    }
    found
}

fn counts(record: &Record, functions: &[(String, u64)]) -> EventCounts {
    let called = |name: &String| record.counters.get(name).copied().unwrap_or(0);
    let functions = functions.iter().filter(|(name, _)| name != TIMER_TICKS);
    let mut counts: BTreeMap<String, u64> =
        functions.map(|(name, _)| (name.clone(), called(name))).collect();
    for (name, start) in FAMILIES {
        let of_family = record.counters.iter().filter(|(counter, _)| counter.starts_with(start));
        counts.insert(name.to_owned(), of_family.map(|(_, count)| count).sum());
    }
    let faults = record.events.iter().filter(|(name, _)| name.ends_with("_faults"));
    counts.extend(faults.map(|(name, count)| (name.clone(), *count)));
    counts
}

#[cfg(test)]
pub mod tests {
    use serde_json::json;

    use super::*;

    /// Returns a line of a release with one configuration, in which all counts are `count`.
    pub fn line(release: &str, count: u64) -> Line {
        let record = |phase: &str| {
            let mut record: Record = serde_json::from_value(json!({
                "schema": "", "phase": phase, "ns": count * 2000, "elapsed_ns": count * 1000,
                "config": {"mode": "", "backing": "anonymous", "memory": 16 << 20, "vcpus": 4,
                           "seed": 0, "iteration": 0},
                "counters": {"DC CIVAC": count, "guest_aborts": count, "timer_ticks": 1},
            }))
            .unwrap();
            record.counters.extend(["TLBI A", "TLBI B"].map(|name| (name.to_owned(), count)));
            record.events.insert("translation_faults".to_owned(), count);
            record
        };
        let functions = ["guest_aborts", "stage2_maps", "timer_ticks"].map(|f| (f.to_owned(), 1));
        Line {
            schema: SCHEMA.to_owned(),
            revision: release.to_owned(),
            origin: Origin::Package(format!("linux-source {release}-1")),
            linux: release.parse().unwrap(),
            key: Key {
                matrix: "1".to_owned(),
                tree: format!("tree-{release}"),
                compiler: "gcc".to_owned(),
                configuration: "c".to_owned(),
                emulator: "QEMU".to_owned(),
                machines: vec!["-M virt".to_owned()],
                program: "p".to_owned(),
            },
            granule: "0.1.0".to_owned(),
            image_sha256: Some("00".to_owned()),
            outcome: Outcome::Results(figures(&[record("create"), record("update")], &functions)),
        }
    }

    #[test]
    fn counts_are_sums_of_families_and_zero_for_a_function_that_is_not_called() {
        let Outcome::Results(results) = line("6.1.2", 7).outcome else { unreachable!() };

        assert_eq!((results.len(), results[0].phases.len()), (1, 2));
        let counts = &results[0].phases[1].counts;
        let expected = [
            ("DC CIVAC", 7),
            ("IC", 0),
            ("TLBI", 14),
            ("guest_aborts", 7),
            ("stage2_maps", 0),
            ("translation_faults", 7),
        ];
        assert_eq!(counts, &expected.map(|(name, n)| (name.to_owned(), n)).into());
    }

    #[test]
    fn a_line_is_read_as_it_was_written() {
        let mut failed = line("6.1.2", 7);
        failed.origin = Origin::Commit("0123".to_owned());
        failed.outcome = Outcome::Failure("does not build".to_owned());
        failed.image_sha256 = None;
        for line in [line("6.1.2", 7), failed] {
            let text = serde_json::to_string(&line).unwrap();

            assert_eq!(serde_json::from_str::<Line>(&text).unwrap(), line, "{text}");
        }
    }

    #[test]
    fn the_setup_is_every_field_of_the_key_except_the_tree() {
        let key = line("6.1.2", 1).key;
        let fields = serde_json::to_value(&key).unwrap();
        for (name, value) in fields.as_object().unwrap() {
            let mut changed = fields.clone();
            changed[name] = if value.is_array() { json!(["other"]) } else { json!("other") };
            let changed: Key = serde_json::from_value(changed).unwrap();

            assert_ne!(changed, key);
            assert_eq!(changed.has_same_setup(&key), name == "tree", "{name}");
        }
    }
}
