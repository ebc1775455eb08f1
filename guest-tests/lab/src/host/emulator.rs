// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The emulated arm64 host: the command line of QEMU's `virt` machine with EL2.
//!
//! * `-icount shift=0,sleep=off`: virtual time advances by one nanosecond an instruction, all CPUs
//!   run in turn in one thread, and idle time takes no real time. Equal inputs produce equal runs.
//! * `dtb-randomness=off` and `-rtc clock=vm` remove entropy and clock of the machine; `nokaslr
//!   norandmaps` remove the kernel's randomness, and functions have fixed addresses.
//! * The plugin ends each CPU's turn after a quantum of virtual time and measures elapsed time.
//!   Otherwise a turn would end at the next timer, and QEMU before 8.1 assigns an empty turn to the
//!   CPU after one that used up its turn. If that CPU holds a lock that the others poll, the
//!   machine hangs.
//! * `skew_tick=1` spreads the ticks of the CPUs, so that they do not contend for a lock.
//! * `oops=panic panic=-1` with `-no-reboot`: an oops ends the emulator.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    time::Duration,
};

use granule_types::units::{Bytes, Nanoseconds};

use crate::{
    command::{Command, CommandError},
    host::costs::Costs,
};

/// The emulated hardware.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hardware {
    /// CPU model, as QEMU names it.
    pub cpu: String,
    pub cpus: u32,
    pub memory: Bytes,
    /// Length of a CPU's turn.
    pub quantum: Nanoseconds,
    /// Costs of instructions in elapsed time.
    pub costs: Option<Costs>,
}

/// One boot.
#[derive(Debug)]
pub struct Boot {
    /// QEMU's program for arm64.
    pub qemu: PathBuf,
    pub hardware: Hardware,
    pub image: PathBuf,
    pub initramfs: PathBuf,
    /// Additional kernel parameters.
    pub append: String,
    /// Log of the serial console.
    pub console: PathBuf,
    /// Log of the emulator's own messages.
    pub log: PathBuf,
    /// The counting plugin.
    pub plugin: PathBuf,
    /// Output file of the plugin.
    pub counts: PathBuf,
    /// Name and virtual address of the functions whose calls are counted.
    pub functions: Vec<(String, u64)>,
    /// Count all instructions, which slows the emulation.
    pub instructions: bool,
    /// Seed of the schedule: varies the turns of the CPUs.
    pub seed: u64,
    /// Real time after which the emulator is terminated.
    pub deadline: Duration,
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

    /// Returns the largest number of turns that a CPU may wait for its own: four rounds, in which
    /// each turn counts twice.
    pub fn longest_wait(&self) -> u64 {
        8 * u64::from(self.cpus)
    }
}

impl Boot {
    /// Returns the command that boots.
    pub fn command(&self) -> Command {
        let Hardware { cpu, cpus, memory, .. } = &self.hardware;
        Command::new("the emulated host", &self.qemu)
            .args(["-M", "virt,virtualization=on,gic-version=3,dtb-randomness=off"])
            .args(["-cpu", cpu])
            .args(["-smp", &cpus.to_string()])
            .args(["-m", &(memory.0 >> 20).to_string()])
            .args(["-icount", "shift=0,sleep=off"])
            .args(["-rtc", "clock=vm,base=2000-01-01"])
            .args(["-nic", "none", "-display", "none", "-monitor", "none"])
            .arg("-no-reboot")
            .arg("-chardev")
            .arg(with_path("file,id=console,path=", &self.console))
            .args(["-serial", "chardev:console"])
            .arg("-plugin")
            .arg(self.plugin_argument())
            .arg("-kernel")
            .arg(&self.image)
            .arg("-initrd")
            .arg(&self.initramfs)
            .args(["-append", &self.kernel_command_line()])
            .log(&self.log)
            .deadline(self.deadline)
    }

    fn kernel_command_line(&self) -> String {
        let fixed = "console=ttyAMA0 nokaslr norandmaps skew_tick=1 oops=panic panic=-1";
        match self.append.as_str() {
            "" => fixed.to_owned(),
            append => format!("{fixed} {append}"),
        }
    }

    fn plugin_argument(&self) -> OsString {
        let mut argument = with_path("file=", &self.plugin);
        argument.push(",");
        argument.push(with_path("out=", &self.counts));
        if self.instructions {
            argument.push(",instructions=on");
        }
        argument.push(format!(",quantum={},seed={}", self.hardware.quantum.0, self.seed));
        if let Some(costs) = &self.hardware.costs {
            argument.push(costs.arguments());
        }
        for (name, address) in &self.functions {
            argument.push(format!(",at={name}:{address:x}"));
        }
        argument
    }
}

/// Returns an option with a path; QEMU requires commas in a value to be doubled.
fn with_path(option: &str, path: &Path) -> OsString {
    let path = path.to_string_lossy().replace(',', ",,");
    OsString::from(format!("{option}{path}"))
}

/// Returns the emulator's version.
pub fn version(qemu: &Path) -> Result<String, CommandError> {
    let text = Command::new("querying QEMU's version", qemu).arg("--version").query()?;
    Ok(text.lines().next().unwrap_or_default().trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_in_paths_are_doubled() {
        let boot = Boot {
            qemu: PathBuf::new(),
            hardware: Hardware {
                cpu: "max".to_owned(),
                cpus: 1,
                memory: Bytes::gib(1),
                quantum: Nanoseconds(1000),
                costs: None,
            },
            image: PathBuf::new(),
            initramfs: PathBuf::new(),
            append: String::new(),
            console: PathBuf::new(),
            log: PathBuf::new(),
            plugin: PathBuf::from("/a,b/x.so"),
            counts: PathBuf::from("/c"),
            functions: vec![("guest_aborts".to_owned(), 0xffff_8000_1002_e4d0)],
            instructions: true,
            seed: 3,
            deadline: Duration::ZERO,
        };

        assert_eq!(
            boot.plugin_argument(),
            "file=/a,,b/x.so,out=/c,instructions=on,quantum=1000,seed=3,at=guest_aborts:ffff80001002e4d0"
        );
    }
}
