// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The emulated arm64 host: the command line of QEMU's `virt` machine with EL2.
//!
//! * `-icount shift=0,sleep=off`: virtual time advances by one nanosecond an instruction, all CPUs
//!   run in turn in one thread, and idle time takes no real time. Equal inputs produce equal runs.
//! * `dtb-randomness=off` and `-rtc clock=vm` hide the entropy and the clock of the real machine;
//!   `nokaslr norandmaps` disable the kernel's randomization, so functions have fixed addresses.
//! * The plugin ends each CPU's turn after a quantum of virtual time and measures elapsed time.
//!   Otherwise, a turn would end at the next timer. QEMU before 8.1 then assigns an empty turn to
//!   the CPU after one that used up its turn; if that CPU holds a lock that the others poll, the
//!   machine hangs.
//! * `skew_tick=1` staggers the timer ticks of the CPUs, so that they do not contend for a lock.
//! * `oops=panic panic=-1` with `-no-reboot`: an oops ends the emulator.

use std::path::Path;

use granule_types::units::{Bytes, Nanoseconds};

use crate::{
    command::{Command, CommandError},
    host::costs::Costs,
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hardware {
    /// CPU model, as QEMU names it.
    pub cpu: String,
    pub cpus: u32,
    pub memory: Bytes,
    /// Length of a CPU's turn in virtual time.
    pub quantum: Nanoseconds,
    /// Costs of instructions in elapsed time.
    pub costs: Option<Costs>,
}

impl Hardware {
    /// Describes the options that affect results, for the records.
    pub fn describe(&self) -> String {
        let Self { cpu, cpus, memory, quantum: Nanoseconds(quantum), .. } = self;
        let costs = self.costs.as_ref().map_or_else(String::new, |costs| format!(", {costs}"));
        format!(
            "-M virt,virtualization=on -cpu {cpu} -smp {cpus} -m {memory} -icount shift=0, \
             skew_tick=1, turns of {quantum} ns{costs}"
        )
    }

    /// Returns the largest number of turns that a runnable CPU may wait: four rounds, in which each
    /// turn counts twice.
    pub fn longest_wait(&self) -> u64 {
        8 * u64::from(self.cpus)
    }

    /// Returns the emulator's command for this hardware, without a kernel.
    pub fn emulator(&self, qemu: &Path) -> Command {
        let Self { cpu, cpus, memory, .. } = self;
        Command::new("the emulated host", qemu)
            .args(["-M", "virt,virtualization=on,gic-version=3,dtb-randomness=off"])
            .args(["-cpu", cpu])
            .args(["-smp", &cpus.to_string()])
            .args(["-m", &(memory.0 >> 20).to_string()])
            .args(["-icount", "shift=0,sleep=off"])
            .args(["-rtc", "clock=vm,base=2000-01-01"])
            .args(["-nic", "none", "-display", "none", "-monitor", "none"])
            .arg("-no-reboot")
    }
}

/// Returns the kernel command line with the additional parameters `append`.
pub fn kernel_command_line(append: &str) -> String {
    let fixed = "console=ttyAMA0 nokaslr norandmaps skew_tick=1 oops=panic panic=-1";
    format!("{fixed} {append}").trim_end().to_owned()
}

/// Returns an option with a path; QEMU requires commas in a value to be doubled.
pub fn with_path(option: &str, path: &Path) -> String {
    format!("{option}{}", path.to_string_lossy().replace(',', ",,"))
}

pub fn version(qemu: &Path) -> Result<String, CommandError> {
    let text = Command::new("querying QEMU's version", qemu).arg("--version").query()?;
    Ok(text.lines().next().unwrap_or_default().trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_in_paths_are_doubled() {
        assert_eq!(with_path("file=", Path::new("/a,b/x.so")), "file=/a,,b/x.so");
    }
}
