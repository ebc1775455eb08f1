// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The emulated arm64 host: QEMU's `virt` board with EL2, its options and nothing random.
//!
//! * `-icount shift=0,sleep=off`: virtual time is one nanosecond for each instruction executed, all
//!   CPUs take turns in one thread, and waiting costs no real time. The same start gives the same
//!   run to the bit.
//! * `dtb-randomness=off` and `-rtc clock=vm` keep the host's entropy and clock out; `nokaslr
//!   norandmaps` do so within the kernel, and let functions be counted by address.
//! * The CPUs' turns end when a timer fires. `skew_tick=1` spreads their ticks, so that a turn is a
//!   fraction of a tick and work that should be parallel is not done by one CPU at a stretch.
//! * Behind each CPU that works there is one that is switched off. QEMU before 8.1 gives the CPU
//!   behind one that has used up its turn a turn of no length; if that CPU holds a lock that the
//!   others retry for without sleeping, as faulting vCPUs do while an invalidation is under way, or
//!   has to answer an interrupt that another spins for, none of them ever gets on. A CPU that is
//!   off loses nothing by it.
//! * `oops=panic panic=-1` with `-no-reboot`: a kernel that dies ends the emulator.

use std::{
    ffi::OsString,
    fmt::Write,
    path::{Path, PathBuf},
    time::Duration,
};

use super::step::{Step, StepError};
use granule_types::units::Bytes;

const PROGRAM: &str = "qemu-system-aarch64";

/// The emulated host's hardware.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hardware {
    /// QEMU's name of the CPU model.
    pub cpu: String,
    /// How many CPUs work; as many more are switched off.
    pub cpus: u32,
    /// How much memory.
    pub memory: Bytes,
}

/// One boot.
#[derive(Debug, Clone)]
pub struct Boot {
    /// The hardware.
    pub hardware: Hardware,
    /// The kernel.
    pub image: PathBuf,
    /// The initramfs.
    pub initramfs: PathBuf,
    /// More words on the kernel's command line.
    pub append: String,
    /// Where the console goes.
    pub console: PathBuf,
    /// Where the emulator's own messages go.
    pub log: PathBuf,
    /// The counting plugin.
    pub plugin: Plugin,
    /// The real time after which it is ended.
    pub deadline: Duration,
}

/// The counting plugin and what it counts.
#[derive(Debug, Clone)]
pub struct Plugin {
    /// The shared object.
    pub library: PathBuf,
    /// Where the segments go.
    pub out: PathBuf,
    /// Functions whose entries are counted: name and virtual address.
    pub functions: Vec<(String, u64)>,
    /// All instructions are counted too, which takes time.
    pub instructions: bool,
}

impl Hardware {
    /// The options that change results, for the records.
    pub fn describe(&self) -> String {
        let Self { cpu, memory, .. } = self;
        let cpus = self.all_cpus();
        format!(
            "-M virt,virtualization=on -cpu {cpu} -smp {cpus} -m {memory} -icount shift=0, \
             skew_tick=1, every other CPU off"
        )
    }

    fn all_cpus(&self) -> u32 {
        self.cpus.saturating_mul(2)
    }
}

impl Boot {
    /// The command that boots.
    pub fn step(&self) -> Step {
        let Hardware { cpu, memory, .. } = &self.hardware;
        Step::new("the emulated host", PROGRAM)
            .args([
                "-M",
                "virt,virtualization=on,gic-version=3,dtb-randomness=off",
            ])
            .args(["-cpu", cpu])
            .args(["-smp", &self.hardware.all_cpus().to_string()])
            .args(["-m", &(memory.0 >> 20).to_string()])
            .args(["-icount", "shift=0,sleep=off"])
            .args(["-rtc", "clock=vm,base=2000-01-01"])
            .args(["-nic", "none", "-display", "none", "-monitor", "none"])
            .arg("-no-reboot")
            .arg("-chardev")
            .arg(with_file("file,id=console,path=", &self.console))
            .args(["-serial", "chardev:console"])
            .arg("-plugin")
            .arg(self.plugin.argument())
            .arg("-kernel")
            .arg(&self.image)
            .arg("-initrd")
            .arg(&self.initramfs)
            .args(["-append", &self.command_line()])
            .log(&self.log)
            .deadline(self.deadline)
    }

    /// The kernel's command line.
    pub fn command_line(&self) -> String {
        let mut line =
            "console=ttyAMA0 nokaslr norandmaps skew_tick=1 oops=panic panic=-1".to_owned();
        if !self.append.is_empty() {
            line.push(' ');
            line.push_str(&self.append);
        }
        line
    }
}

impl Plugin {
    fn argument(&self) -> OsString {
        let mut argument = with_file("file=", &self.library);
        argument.push(",");
        argument.push(with_file("out=", &self.out));
        let mut rest = String::new();
        if self.instructions {
            rest += ",instructions=on";
        }
        for (name, address) in &self.functions {
            // Writing to a string cannot fail.
            let _ = write!(rest, ",at={name}:{address:x}");
        }
        argument.push(rest);
        argument
    }
}

/// An option with a path in it: QEMU wants every comma in a value doubled.
fn with_file(option: &str, path: &Path) -> OsString {
    OsString::from(format!(
        "{option}{}",
        path.to_string_lossy().replace(',', ",,")
    ))
}

/// The emulator's version, as it says it.
///
/// # Errors
/// It is not installed.
pub fn version() -> Result<String, StepError> {
    let text = Step::new("asking for QEMU's version", PROGRAM)
        .arg("--version")
        .ask()?;
    Ok(text.lines().next().unwrap_or_default().trim().to_owned())
}

/// The functions worth counting and the names they are counted under, best candidate first: what
/// one kernel calls them, another calls otherwise.
const FUNCTIONS: [(&str, &[&str]); 6] = [
    ("guest_aborts", &["kvm_handle_guest_abort"]),
    (
        "page_lookups",
        &["__gfn_to_pfn_memslot", "__kvm_faultin_pfn"],
    ),
    (
        "notifier_unmaps",
        &["kvm_unmap_hva_range", "kvm_unmap_gfn_range"],
    ),
    ("stage2_maps", &["kvm_pgtable_stage2_map"]),
    (
        "memcache_topups",
        &["kvm_mmu_topup_memory_cache", "__kvm_mmu_topup_memory_cache"],
    ),
    (
        "permission_relaxations",
        &["kvm_pgtable_stage2_relax_perms"],
    ),
];

/// The functions to count that a kernel's `System.map` has.
pub fn functions(system_map: &str) -> Vec<(String, u64)> {
    let address = |wanted: &str| {
        system_map.lines().find_map(|line| {
            let mut words = line.split_ascii_whitespace();
            let address = u64::from_str_radix(words.next()?, 16).ok()?;
            (words.nth(1)? == wanted).then_some(address)
        })
    };
    FUNCTIONS
        .iter()
        .filter_map(|(name, candidates)| {
            let address = candidates.iter().find_map(|candidate| address(candidate))?;
            Some(((*name).to_owned(), address))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_in_paths_are_doubled() {
        let plugin = Plugin {
            library: PathBuf::from("/a,b/x.so"),
            out: PathBuf::from("/c"),
            functions: vec![("guest_aborts".to_owned(), 0xffff_8000_1002_e4d0)],
            instructions: true,
        };

        assert_eq!(
            plugin.argument(),
            "file=/a,,b/x.so,out=/c,instructions=on,at=guest_aborts:ffff80001002e4d0"
        );
    }

    #[test]
    fn functions_are_found_under_either_kernels_name() {
        let old = "ffff800010000000 T _text\nffff80001002eeb0 T kvm_unmap_hva_range\n";
        let new = "ffff80001002eeb8 T kvm_unmap_gfn_range\n\nffff8000ffffffff A\n";

        assert_eq!(
            functions(old),
            [("notifier_unmaps".to_owned(), 0xffff_8000_1002_eeb0)]
        );
        assert_eq!(
            functions(new),
            [("notifier_unmaps".to_owned(), 0xffff_8000_1002_eeb8)]
        );
    }
}
