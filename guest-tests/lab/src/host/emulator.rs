// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The emulated arm64 host: the command line of QEMU's `virt` machine with EL2.
//!
//! * `-icount shift=0,sleep=off`: virtual time advances by one nanosecond an instruction, all CPUs
//!   run in turn in one thread, and idle time takes no real time. Equal inputs produce equal runs.
//! * `dtb-randomness=off`, `-seed` and `-rtc clock=vm` hide the entropy and the clock of the real
//!   machine, also from `RNDR` of `-cpu max`; `nokaslr norandmaps` disable the kernel's
//!   randomisation, so functions have fixed addresses.
//! * The plugin ends each CPU's turn after a quantum of virtual time and measures elapsed time.
//!   Without a quantum, a turn ends at the next timer, and QEMU before 8.1 assigns an empty turn to
//!   the next CPU. If that CPU holds a contended spinlock, the machine hangs.
//! * `skew_tick=1` staggers the timer ticks of the CPUs, so that they do not contend for a lock.
//! * `oops=panic panic=-1` with `-no-reboot`: an oops ends the emulator.

use std::{io::Write, iter, path::Path};

use granule_types::units::{Bytes, Nanoseconds};

use crate::{
    command::{Command, CommandError},
    error::LabError,
    host::{costs::CostTable, hold::Hold, tlb::TlbModel},
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmulatedMachine {
    /// CPU model, as QEMU names it.
    pub cpu: String,
    pub cpus: u32,
    pub memory: Bytes,
    /// Indicates that a job uses only a small part of the memory, so that this machine need not have
    /// all of it.
    pub is_sparse: bool,
    /// Length of a CPU's turn in virtual time; `None` if elapsed time is not measured.
    pub quantum: Option<Nanoseconds>,
    /// Costs of instructions in elapsed time.
    pub costs: Option<CostTable>,
    /// Model of the TLBs of the only CPU.
    pub tlb: Option<TlbModel>,
    /// Indicates that the kernel's functions are counted.
    pub counts_functions: bool,
    /// Hold of a CPU at a function.
    pub hold: Option<Hold>,
    /// Kernel parameters of `--append`, which affect results as the machine does.
    pub appended: Option<String>,
}

impl EmulatedMachine {
    /// Omits elapsed time if the machine has one CPU, which has no turns.
    pub fn omit_turns_of_one_cpu(&mut self) {
        self.quantum = self.quantum.filter(|_| self.cpus > 1);
    }

    /// Formats the options that affect results, for the records.
    pub fn describe(&self) -> String {
        let Self { cpu, cpus, memory, quantum, .. } = self;
        let all = format!(
            "-M virt,virtualization=on -cpu {cpu} -smp {cpus} -m {memory} -icount shift=0, \
             skew_tick=1"
        );
        let set = [
            quantum.map(|Nanoseconds(quantum)| format!("turns of {quantum} ns")),
            self.costs.as_ref().map(ToString::to_string),
            self.hold.as_ref().map(|hold| format!("hold {hold}")),
            self.appended.clone(),
        ];
        iter::once(all).chain(set.into_iter().flatten()).collect::<Vec<_>>().join(", ")
    }

    /// Returns the maximum number of turns that a runnable CPU may wait: four rounds, in which each
    /// turn counts twice.
    pub fn max_wait(&self) -> u64 {
        8 * u64::from(self.cpus)
    }

    /// Returns the memory that the emulator's process requires: that of the machine, and QEMU's buffer
    /// of translated code, which has up to 1 GiB.
    pub fn process_memory(&self) -> Bytes {
        // A booted kernel has written its `struct page`s, 1/64, and its tables, 1/512.
        let used = if self.is_sparse { self.memory.0 / 32 } else { self.memory.0 };
        Bytes(used + Bytes::gib(1).0 + Bytes::mib(256).0)
    }

    /// Returns the emulator command for this hardware, without a kernel.
    pub fn emulator(&self, qemu: &Path) -> Command {
        let Self { cpu, cpus, memory, .. } = self;
        let machine = "virt,virtualization=on,gic-version=3,dtb-randomness=off";
        let command = match self.is_sparse {
            true => program(qemu)
                .args(["-M", &format!("{machine},memory-backend=ram"), "-object"])
                .arg(format!("memory-backend-ram,id=ram,size={}M,reserve=off", memory.0 >> 20)),
            false => program(qemu).args(["-M", machine]),
        };
        command
            .args(["-cpu", cpu])
            .args(["-smp", &cpus.to_string()])
            .args(["-m", &(memory.0 >> 20).to_string()])
            .args(["-icount", "shift=0,sleep=off"])
            .args(["-seed", "0"])
            .args(["-rtc", "clock=vm,base=2000-01-01"])
            .args(["-nic", "none", "-display", "none", "-monitor", "none"])
            .arg("-no-reboot")
    }

    /// Returns the value of `-plugin` that measures this machine and writes counts to a file.
    pub fn plugin_option(&self, plugin: &Path, counts: &Path) -> String {
        let mut option = path_option("file=", plugin);
        option += &path_option(",out=", counts);
        option += &self.tlb.as_ref().map_or_else(String::new, TlbModel::plugin_arguments);
        option += if self.counts_functions { ",blocks=on" } else { "" };
        let Some(Nanoseconds(quantum)) = self.quantum else { return option };
        option += &format!(",quantum={quantum}");
        option += &self.costs.as_ref().map_or_else(String::new, CostTable::plugin_arguments);
        option
    }
}

/// Returns the command of a program, with the data of its packages if they are unpacked to a private
/// folder `ROOT` and the program is `ROOT/usr/bin/NAME`.
fn program(qemu: &Path) -> Command {
    let command = Command::new("the emulated host", qemu);
    let root = qemu.ancestors().nth(3).filter(|root| root.parent().is_some());
    let data = root.map(|root| root.join("usr/share/qemu")).filter(|data| data.is_dir());
    match data {
        Some(data) => command.arg("-L").arg(data),
        None => command,
    }
}

/// Returns the kernel command line with the additional parameters `append`.
pub fn kernel_command_line(append: &str) -> String {
    let fixed = "console=ttyAMA0 nokaslr norandmaps skew_tick=1 oops=panic panic=-1";
    format!("{fixed} {append}").trim_end().to_owned()
}

/// Appends a path to an option, with doubled commas as QEMU requires.
pub fn path_option(option: &str, path: &Path) -> String {
    format!("{option}{}", path.to_string_lossy().replace(',', ",,"))
}

pub fn version(qemu: &Path) -> Result<String, CommandError> {
    let text = Command::new("querying QEMU's version", qemu).arg("--version").query()?;
    Ok(text.lines().next().unwrap_or_default().trim().to_owned())
}

/// Starts the emulator with the plugin, if it is built, and ends it before the first instruction: an unknown CPU
/// model, or an interface that this QEMU lacks, is reported before kernels are built.
pub fn probe(
    qemu: &Path,
    machine: &EmulatedMachine,
    plugin: Option<&Path>,
) -> Result<(), LabError> {
    let unusable = |error: CommandError| {
        let qemu = qemu.display();
        LabError::Unusable(format!("{qemu} cannot run the emulated host (--qemu, --cpu): {error}"))
    };
    let failed = |error| CommandError::file("probe", qemu, error);
    let mut quit = tempfile::NamedTempFile::new().map_err(failed)?;
    quit.write_all(b"quit\n").map_err(failed)?;
    let plugin = plugin.map(|path| machine.plugin_option(path, Path::new("/dev/null")));
    let plugin = plugin.iter().flat_map(|option| ["-plugin", option]);
    machine
        .emulator(qemu)
        .args(["-serial", "none", "-monitor", "stdio", "-S"])
        .args(plugin)
        .input(quit.path())
        .query()
        .map(drop)
        .map_err(unusable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_in_paths_are_doubled() {
        assert_eq!(path_option("file=", Path::new("/a,b/x.so")), "file=/a,,b/x.so");
    }

    #[test]
    fn an_unpacked_emulator_uses_the_data_of_its_package() {
        let root = tempfile::tempdir().unwrap();
        let qemu = root.path().join("usr/bin/qemu");
        let without = program(&qemu).to_string();
        std::fs::create_dir_all(root.path().join("usr/share/qemu")).unwrap();

        assert!(!without.contains("-L"));
        assert!(program(&qemu).to_string().contains(" -L "));
        assert!(!program(Path::new("/usr/bin/qemu")).to_string().contains("-L"));
        assert!(!program(Path::new("qemu")).to_string().contains("-L"));
    }

    #[test]
    fn the_probe_refuses_an_unknown_cpu_model_and_names_it() {
        let qemu = Path::new("qemu-system-aarch64");
        if let Err(error) = version(qemu) {
            return granule_types::testing::skip(error);
        }
        let machine = EmulatedMachine {
            cpu: "no-such-cpu".into(),
            cpus: 1,
            memory: Bytes::mib(64),
            is_sparse: false,
            quantum: None,
            costs: None,
            tlb: None,
            counts_functions: false,
            hold: None,
            appended: None,
        };

        let error = probe(qemu, &machine, None).unwrap_err().to_string();

        assert!(error.contains("--cpu") && error.contains("'no-such-cpu'"), "{error}");
    }
}
