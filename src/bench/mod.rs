// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `granule bench`: runs the page-table test.
//!
//! `-m -p -b -v -s` and the lines on standard output are those of the kernel's
//! `kvm_page_table_test`. With `--json -`, records are written to standard output and the lines to
//! standard error.

mod args;
#[cfg(test)]
mod tests;
pub(super) mod values;

use std::{
    collections::BTreeMap,
    error::Error,
    io::{self, Write},
    path::Path,
    time::Duration,
};

use clap::{Args as _, FromArgMatches as _};
use granule_pgtable_test::{
    config::Migration,
    harness::{self, HarnessError, RunPlan},
    log_lines::LogLines,
    machine::Machine,
    pgtable_vm::{KvmConfig, KvmMachine},
    software_machine::{DEFAULT_POLICY, SoftwareMachine, SoftwareMachineConfig},
};
use granule_report::results::RecordWriter;
use granule_types::{guest_mode::GuestMode, record::Record, units::Bytes};

use super::{CommandOutcome, CommandResult, own_digest, print_error};
use crate::values::DirtyLogOption;
pub use args::Args;
use values::{Engine, GuestMapOption};

/// Runs `granule bench`.
pub fn run(args: Args) -> CommandResult {
    args.check()?;
    let mut json = None;
    let programs = args.output.json.as_ref().map(|_| own_digest::programs()).unwrap_or_default();
    let points = args.sweep_points();
    for point in &points {
        let runs = points.len() as u64;
        if run_point(point, runs, &programs, &mut json)? == CommandOutcome::Failed {
            return Ok(CommandOutcome::Failed);
        }
    }
    Ok(CommandOutcome::Done)
}

/// Runs the test once, as one of `runs`, with these digests in the records. The first run creates the
/// file of `json`.
fn run_point(
    args: &Args,
    runs: u64,
    programs: &BTreeMap<String, String>,
    json: &mut Option<RecordWriter>,
) -> CommandResult {
    let PreparedRun { mut machine, plan, warning } = args.prepare()?;
    if let Some(warning) = warning {
        eprintln!("granule: warning: {warning}");
    }
    // The file is created after the machine: a failed start truncates no existing file.
    if let (None, Some(path)) = (&json, &args.output.json) {
        *json = Some(RecordWriter::create(path, runs * plan.record_count())?);
    }
    let to: Box<dyn Write> = match args.output.json.as_deref() == Some(Path::new("-")) {
        true => Box::new(io::stderr()),
        false => Box::new(io::stdout()),
    };
    let mut lines = LogLines::new(to, plan.config.clone(), plan.iterations);
    let result = harness::run(machine.as_mut(), &plan, &mut |progress| {
        lines.print(&progress)?;
        if let (harness::RunEvent::PhaseComplete(record), Some(json)) = (&progress, json.as_mut()) {
            json.write(&Record { programs: programs.clone(), ..(*record).clone() })?;
        }
        Ok(())
    });
    match result {
        Ok(()) => Ok(CommandOutcome::Done),
        Err(error) => outcome_of_error(error),
    }
}

/// Returns the failure of a test, or the error of a test that cannot run as configured.
fn outcome_of_error(error: HarnessError) -> CommandResult {
    use HarnessError::{MigrationUnsupported, Observer, StartVcpus, TooManyVcpus};
    match error {
        StartVcpus(_) | Observer(_) | MigrationUnsupported | TooManyVcpus(..) => Err(error.into()),
        error => {
            print_error(&error);
            Ok(CommandOutcome::Failed)
        }
    }
}

/// A machine and the plan of its run.
pub(crate) struct PreparedRun {
    pub(crate) machine: Box<dyn Machine>,
    pub(crate) plan: RunPlan,
    /// Warning about times that this machine's KVM distorts.
    pub(crate) warning: Option<String>,
}

/// Error returned for an option that the selected engine does not support.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} requires --engine {1}; omit it, or select that engine")]
struct WrongEngine(&'static str, &'static str);

/// Conversion of the options to machine configurations and a plan.
impl Args {
    /// Parses the arguments of `granule bench`.
    ///
    /// # Errors
    /// An argument is not valid.
    pub(crate) fn from_arguments(arguments: &[String]) -> Result<Self, clap::Error> {
        let command = Self::augment_args(clap::Command::new("bench").no_binary_name(true));
        Self::from_arg_matches(&command.try_get_matches_from(arguments)?)
    }

    /// Creates the machine of the selected engine and the plan of a run.
    ///
    /// # Errors
    /// The machine cannot be created as configured.
    pub(crate) fn prepare(&self) -> Result<PreparedRun, Box<dyn Error>> {
        let mode = self.guest.mode.unwrap_or(GuestMode::P48V48_4K);
        let (machine, mode, warning): (Box<dyn Machine>, _, _) = match self.host.engine {
            Engine::Kvm => {
                let machine = KvmMachine::new(self.kvm_config()?)?;
                let (mode, warning) = (machine.mode(), machine.emulation_warning());
                (Box::new(machine), mode, warning)
            }
            Engine::Software => {
                (Box::new(SoftwareMachine::new(&self.software_config()?)?), mode, None)
            }
        };
        let plan = self.plan(mode, machine.region().size);
        Ok(PreparedRun { machine, plan, warning })
    }

    /// Returns the plan of a run with this guest mode and memory size.
    fn plan(&self, mode: GuestMode, memory: Bytes) -> RunPlan {
        let workload = &self.workload;
        let mut plan = RunPlan {
            iterations: workload.iterations.get(),
            phases: self.selected_phases().unwrap_or_else(|_| workload.phases.clone()),
            migration: workload.migrate.map(|rounds| Migration {
                rounds,
                round_time: Duration::from_millis(workload.round_ms.into()),
            }),
            deadline: Duration::from_secs(workload.deadline.get().into()),
            accepts_fallback: self.host.accept_fallback,
            ..RunPlan::new(mode.to_string(), workload.backing, memory, self.vcpus())
        };
        plan.config.seed = workload.seed;
        // The software machine always populates its memory.
        plan.config.prefault =
            self.host.populates_host_memory() || self.host.engine == Engine::Software;
        plan.config.options = self.options();
        plan
    }

    fn kvm_config(&self) -> Result<KvmConfig, WrongEngine> {
        if self.host.policy.is_some() {
            return Err(WrongEngine("--policy", "software"));
        }
        let vcpus = self.vcpus();
        Ok(KvmConfig {
            mode: self.guest.mode,
            phys_offset: self.guest.phys_offset,
            prefault: self.host.populates_host_memory(),
            populates_stage2: self.host.pre_fault,
            accepts_fallback: self.host.accept_fallback,
            pinned_cpus: self.host.pin.as_ref().map_or_else(Vec::new, |list| list.for_vcpus(vcpus)),
            ipa_bits: self.guest.ipa_bits,
            dirty_mode: self.host.dirty_log.into(),
            eager_split: self.host.eager_split,
            vm_capabilities: self.host.vm_capability.clone(),
            guest_map: self.guest.guest_map.into(),
            events: self.output.events.into(),
            ..KvmConfig::new(self.workload.backing, self.memory(), vcpus)
        })
    }

    /// Returns the configuration of a software machine; refuses options that only KVM supports.
    fn software_config(&self) -> Result<SoftwareMachineConfig, WrongEngine> {
        let given = [
            ("--phys-offset", self.guest.phys_offset.is_some()),
            ("--pre-fault", self.host.pre_fault),
            ("--pin", self.host.pin.is_some()),
            ("--ipa-bits", self.guest.ipa_bits.is_some()),
            ("--dirty-log", self.host.dirty_log != DirtyLogOption::default()),
            ("--eager-split", self.host.eager_split.is_some()),
            ("--vm-capability", !self.host.vm_capability.is_empty()),
            ("--guest-map", self.guest.guest_map != GuestMapOption::default()),
            ("--migrate", self.workload.migrate.is_some()),
        ];
        if let Some((option, _)) = given.into_iter().find(|(_, is_given)| *is_given) {
            return Err(WrongEngine(option, "kvm"));
        }
        let policy = self.host.policy.as_deref().unwrap_or(DEFAULT_POLICY);
        Ok(SoftwareMachineConfig {
            backing: self.workload.backing,
            memory: self.memory(),
            vcpus: self.vcpus(),
            policy: policy.to_owned(),
        })
    }
}
