// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One iteration of the selected phases.

use super::{
    checks,
    error::{HarnessError, host_error},
    runner::Runner,
    tasks::WrittenRange,
};
use granule_types::phase::Phase;

/// Runs an iteration.
pub(super) fn run(runner: &mut Runner<'_, '_>, iteration: u32) -> Result<(), HarnessError> {
    runner.begin(iteration)?;
    let written = create_and_update(runner)?;
    if runner.selects(Phase::Rebuild) {
        runner.guest_phase(Phase::Rebuild)?;
    }
    if runner.selects(Phase::Exec) {
        runner.untimed_step("planting instructions", |tasks, vcpu| match vcpu {
            0 => tasks.plant(),
            _ => tasks.nothing(),
        })?;
        runner.guest_phase(Phase::Exec)?;
    }
    if let Some(written) = written {
        runner.untimed_step("verifying contents", |tasks, vcpu| match vcpu {
            0 => tasks.verify(written),
            _ => tasks.nothing(),
        })?;
        checks::contents(runner.machine, written)?;
    }
    runner.finish()
}

/// Runs the phases up to `logging-off` and returns the addresses that were written last.
fn create_and_update(runner: &mut Runner<'_, '_>) -> Result<Option<WrittenRange>, HarnessError> {
    let mut written = None;
    if runner.selects(Phase::Create) {
        runner.guest_phase(Phase::Create)?;
        written = Some(runner.tasks.written_by(Phase::Create));
    }
    if runner.selects(Phase::LoggingOn) {
        runner.host_phase(Phase::LoggingOn, |machine| machine.set_dirty_logging(true))?;
    }
    if runner.selects(Phase::Update) {
        runner.guest_phase(Phase::Update)?;
        let update = runner.tasks.written_by(Phase::Update);
        let log = runner.machine.dirty_log();
        let log = log.map_err(host_error("reading the dirty bitmap"))?;
        checks::dirty_log(&runner.region, update, &log)?;
        written = Some(update);
    }
    if runner.selects(Phase::LoggingOff) {
        runner.host_phase(Phase::LoggingOff, |machine| {
            machine.set_dirty_logging(false)
        })?;
    } else if runner.selects(Phase::LoggingOn) {
        let off = runner.machine.set_dirty_logging(false);
        off.map_err(host_error("switching dirty logging off"))?;
    }
    Ok(written)
}
