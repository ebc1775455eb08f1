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
};

use granule_pgtable_test::{
    harness::{self, HarnessError},
    log_lines::LogLines,
    machine::Machine,
    pgtable_vm::KvmMachine,
    software_machine::{
        SoftwareMachine,
        simulation::{SimulatedMachine, SimulationConfig},
    },
};
use granule_report::results::RecordWriter;
use granule_types::guest_mode::GuestMode;

use super::{CommandResult, Outcome, report};
pub use args::Args;
use values::{Clock, Engine};

/// Runs `granule bench`.
///
/// # Errors
/// The test cannot run as configured.
pub fn run(args: Args) -> CommandResult {
    args.check()?;
    let mut json = None;
    let points = args.points();
    for point in &points {
        if run_one(point, points.len() as u64, &mut json)? == Outcome::Failed {
            return Ok(Outcome::Failed);
        }
    }
    Ok(Outcome::Done)
}

/// Runs the test once, as one of `runs`; the first run whose machine can be made creates `json`.
fn run_one(args: &Args, runs: u64, json: &mut Option<RecordWriter>) -> CommandResult {
    let (mut machine, mode) = make_machine(args)?;
    let plan = args.plan(mode, machine.region().size);
    // After the machine: a run that cannot start leaves an existing file as it is.
    if let (None, Some(path)) = (&json, &args.json) {
        *json = Some(RecordWriter::create(path, runs * plan.records())?);
    }
    let to: Box<dyn Write> = match args.json.as_deref() == Some(Path::new("-")) {
        true => Box::new(io::stderr()),
        false => Box::new(io::stdout()),
    };
    let mut lines = LogLines::new(to, plan.config.clone(), plan.iterations);
    let result = harness::run(machine.as_mut(), &plan, &mut |progress| {
        lines.print(&progress)?;
        if let (harness::Progress::Phase(record), Some(json)) = (&progress, json.as_mut()) {
            json.write(record)?;
        }
        Ok(())
    });
    match result {
        Ok(()) => Ok(Outcome::Done),
        Err(error @ (HarnessError::Start(_) | HarnessError::Observer(_))) => Err(error.into()),
        Err(error) => {
            report(&error);
            Ok(Outcome::Failed)
        }
    }
}

/// Makes the machine of the selected engine, and returns it with its guest mode.
fn make_machine(args: &Args) -> Result<(Box<dyn Machine>, GuestMode), Box<dyn std::error::Error>> {
    let mode = args.mode.unwrap_or(GuestMode::P48V48_4K);
    Ok(match (args.engine, args.clock) {
        (Engine::Kvm, _) => {
            let machine = KvmMachine::new(args.kvm_config()?)?;
            let mode = machine.mode();
            (Box::new(machine), mode)
        }
        (Engine::Model, Clock::Real) => {
            args.check_real_clock()?;
            let machine = SoftwareMachine::new(&args.software_config()?)?;
            (Box::new(machine), mode)
        }
        (Engine::Model, Clock::Virtual) => {
            let (machine, cpu) = (args.software_config()?, args.simulated_cpu()?);
            let config = SimulationConfig::new(machine, cpu, args.prefault)?;
            (Box::new(SimulatedMachine::new(&config)?), mode)
        }
    })
}
