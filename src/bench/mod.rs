// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `granule bench`: runs the page-table test.
//!
//! `-m -p -b -v -s` and the lines on standard output are those of the kernel's
//! `kvm_page_table_test`. With `--json -` the records go to standard output and the lines to
//! standard error.

mod args;
#[cfg(test)]
mod tests;
pub(super) mod values;

use std::{
    io::{self, Write},
    path::Path,
    time::Duration,
};

use granule_pgtable_test::{
    config::Migration,
    harness::{self, HarnessError, RunPlan},
    log_lines::LogLines,
    machine::Machine,
    pgtable_vm::{KvmConfig, KvmMachine},
    software_machine::{DEFAULT_POLICY, SoftwareMachine, SoftwareMachineConfig},
};
use granule_report::results::RecordWriter;
use granule_types::{guest_mode::GuestMode, units::Bytes};

use super::{CommandOutcome, CommandResult, report};
pub use args::Args;
use values::{DirtyLogMode, Engine, GuestMapping, Switch};

/// Runs `granule bench`.
///
/// # Errors
/// The test cannot run as configured.
pub fn run(args: Args) -> CommandResult {
    args.check()?;
    let mut json = None;
    let points = args.points();
    for point in &points {
        if run_one(point, points.len() as u64, &mut json)? == CommandOutcome::Failed {
            return Ok(CommandOutcome::Failed);
        }
    }
    Ok(CommandOutcome::Done)
}

/// Runs the test once, as one of `runs`. The first run with a machine creates the file `json`.
fn run_one(args: &Args, runs: u64, json: &mut Option<RecordWriter>) -> CommandResult {
    let (mut machine, mode) = make_machine(args)?;
    let plan = args.plan(mode, machine.region().size);
    // Created after the machine, so that a run that cannot start keeps an existing file.
    if let (None, Some(path)) = (&json, &args.output.json) {
        *json = Some(RecordWriter::create(path, runs * plan.records())?);
    }
    let to: Box<dyn Write> = match args.output.json.as_deref() == Some(Path::new("-")) {
        true => Box::new(io::stderr()),
        false => Box::new(io::stdout()),
    };
    let mut lines = LogLines::new(to, plan.config.clone(), plan.iterations);
    let result = harness::run(machine.as_mut(), &plan, &mut |progress| {
        lines.print(&progress)?;
        if let (harness::RunEvent::Phase(record), Some(json)) = (&progress, json.as_mut()) {
            json.write(record)?;
        }
        Ok(())
    });
    match result {
        Ok(()) => Ok(CommandOutcome::Done),
        Err(error @ (HarnessError::Start(_) | HarnessError::Observer(_))) => Err(error.into()),
        Err(error) => {
            report(&error);
            Ok(CommandOutcome::Failed)
        }
    }
}

/// Creates the machine of the selected engine, and returns it with its guest mode.
fn make_machine(args: &Args) -> Result<(Box<dyn Machine>, GuestMode), Box<dyn std::error::Error>> {
    let mode = args.guest.mode.unwrap_or(GuestMode::P48V48_4K);
    Ok(match args.host.engine {
        Engine::Kvm => {
            let machine = KvmMachine::new(args.kvm_config()?)?;
            let mode = machine.mode();
            (Box::new(machine), mode)
        }
        Engine::Model => (Box::new(SoftwareMachine::new(&args.software_config()?)?), mode),
    })
}

/// Error returned for an option that the selected engine does not support.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} requires --engine {1}; omit it, or select that engine")]
struct WrongEngine(&'static str, &'static str);

/// The machine and the plan that the options describe.
impl Args {
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
            accept_fallback: self.host.accept_fallback,
            ..RunPlan::new(mode.to_string(), workload.backing, memory, self.vcpus())
        };
        plan.config.seed = workload.seed;
        // The software machine always populates its memory.
        plan.config.prefault = self.host.prefault || self.host.engine == Engine::Model;
        plan.config.options = self.options();
        plan
    }

    /// Returns the configuration of a machine on KVM.
    fn kvm_config(&self) -> Result<KvmConfig, WrongEngine> {
        if self.host.policy.is_some() {
            return Err(WrongEngine("--policy", "model"));
        }
        let vcpus = self.vcpus();
        Ok(KvmConfig {
            mode: self.guest.mode,
            phys_offset: self.guest.phys_offset,
            prefault: self.host.prefault,
            accept_fallback: self.host.accept_fallback,
            pin: self.host.pin.as_ref().map_or_else(Vec::new, |list| list.for_vcpus(vcpus)),
            ipa_bits: self.guest.ipa_bits,
            dirty: self.host.dirty_log.into(),
            eager_split: self.host.eager_split,
            guest_map: self.guest.guest_map.into(),
            events: self.output.events == Switch::On,
            ..KvmConfig::new(self.workload.backing, self.memory(), vcpus)
        })
    }

    /// Returns the configuration of a software machine; refuses options that only KVM supports.
    fn software_config(&self) -> Result<SoftwareMachineConfig, WrongEngine> {
        let given = [
            ("--phys-offset", self.guest.phys_offset.is_some()),
            ("--pin", self.host.pin.is_some()),
            ("--ipa-bits", self.guest.ipa_bits.is_some()),
            ("--dirty-log", self.host.dirty_log != DirtyLogMode::default()),
            ("--eager-split", self.host.eager_split.is_some()),
            ("--guest-map", self.guest.guest_map != GuestMapping::default()),
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
