// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Work of a job: the program that its boot runs, and the lab's files for it.
//!
//! Each variant has the fields of its kind of work only. [`Job`](crate::host::job::Job) contains what
//! PID 1 of the emulated host executes for it.

use std::path::{Path, PathBuf};

use granule_types::{backing::Backing, units::Bytes};

use crate::{
    host::{job::OwnWork, program::Program, zap::Zap},
    jobs::{guest::LinuxGuest, program_run::ProgramRun},
    options::Rodata,
};

/// Work of a job in the emulated host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Work {
    /// `granule bench`.
    Bench,
    /// Program of the kernel's tree: its page-table test or a selftest.
    KernelTest(PathBuf),
    /// User's program.
    Program(ProgramRun),
    /// Measured boot of the host's kernel, and whether PID 1 runs the load on the page cache.
    Boot { boot: MeasuredBoot, loads_page_cache: bool },
    /// Measured removal of memory from page tables.
    Zap(Zap),
    /// VM with a Linux guest.
    Guest(GuestVm),
}

/// Configuration of a boot whose page tables are measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MeasuredBoot {
    pub memory: Bytes,
    pub rodata: Rodata,
}

/// VM with a Linux guest, and its purpose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestVm {
    pub guest: LinuxGuest,
    pub vcpus: u32,
    pub backing: Backing,
    pub purpose: GuestPurpose,
}

/// Purpose of a VM. Only a guest that is checked may have a kernel of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GuestPurpose {
    /// PID 1 or a script checks the guest, which `granule run` boots.
    Checks,
    /// The same in a user's VMM.
    UserVmm(Program),
    /// PID 1 runs a user's program.
    Program(ProgramRun),
    /// PID 1 reports the page tables of the guest's kernel.
    KernelTables(MeasuredBoot),
}

impl Work {
    /// Returns the VM, if the work is one.
    pub const fn guest(&self) -> Option<&GuestVm> {
        match self {
            Self::Guest(vm) => Some(vm),
            _ => None,
        }
    }

    /// Returns the run of a user's program, in the host or in a guest.
    pub const fn program(&self) -> Option<&ProgramRun> {
        match self {
            Self::Program(run)
            | Self::Guest(GuestVm { purpose: GuestPurpose::Program(run), .. }) => Some(run),
            _ => None,
        }
    }

    /// Returns the user's VMM.
    pub const fn vmm(&self) -> Option<&Program> {
        match self {
            Self::Guest(GuestVm { purpose: GuestPurpose::UserVmm(vmm), .. }) => Some(vmm),
            _ => None,
        }
    }

    /// Returns the boot that is measured, of the host or of a guest.
    pub const fn measured_boot(&self) -> Option<MeasuredBoot> {
        match self {
            Self::Boot { boot, .. }
            | Self::Guest(GuestVm { purpose: GuestPurpose::KernelTables(boot), .. }) => Some(*boot),
            _ => None,
        }
    }

    /// Returns the name and the source of each file in the initramfs that is not of this workspace
    /// and not of the kernel's build.
    pub fn files(&self) -> Vec<(&str, &Path)> {
        match self {
            Self::Bench | Self::Boot { .. } | Self::Zap(_) => Vec::new(),
            Self::KernelTest(test) => vec![("test", test)],
            Self::Program(run) => files_of(&run.program),
            Self::Guest(vm) => {
                let mut files = match &vm.purpose {
                    GuestPurpose::UserVmm(program) => files_of(program),
                    GuestPurpose::Program(run) => files_of(&run.program),
                    GuestPurpose::Checks | GuestPurpose::KernelTables(_) => Vec::new(),
                };
                files.extend(vm.guest.files.iter().map(|(source, path)| (*path, &**source)));
                files
            }
        }
    }

    /// Returns the work that PID 1 does itself.
    pub fn own_work(&self) -> Option<OwnWork> {
        match *self {
            Self::Boot { loads_page_cache, .. } => Some(OwnWork::ReportTables { loads_page_cache }),
            Self::Zap(zap) => Some(OwnWork::Zap(zap)),
            Self::Bench | Self::KernelTest(_) | Self::Program(_) | Self::Guest(_) => None,
        }
    }

    /// Reports whether PID 1 marks the program of the job: others mark their phases, or PID 1 of the
    /// guest marks the program, so that its boot is not counted.
    pub const fn has_unmarked_program(&self) -> bool {
        match self {
            Self::KernelTest(_) | Self::Program(_) => true,
            Self::Bench | Self::Boot { .. } | Self::Zap(_) => false,
            Self::Guest(vm) => {
                matches!(vm.purpose, GuestPurpose::Checks | GuestPurpose::UserVmm(_))
            }
        }
    }

    /// Returns the arguments of the plugin for the counts that the work requires, each after a comma.
    pub const fn counts(&self) -> &'static str {
        match self {
            Self::Boot { .. }
            | Self::Zap(_)
            | Self::Guest(GuestVm { purpose: GuestPurpose::KernelTables(_), .. }) => {
                ",instructions=on,stores=on,barriers=on"
            }
            Self::Guest(GuestVm {
                purpose: GuestPurpose::Checks | GuestPurpose::UserVmm(_),
                ..
            }) => ",instructions=on",
            Self::Bench
            | Self::KernelTest(_)
            | Self::Program(_)
            | Self::Guest(GuestVm { purpose: GuestPurpose::Program(_), .. }) => "",
        }
    }
}

fn files_of(program: &Program) -> Vec<(&str, &Path)> {
    program.sources().map(|(path, source)| (path, source.as_path())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        jobs::matrix::{self, tests::options},
        values::PageSize,
    };

    #[test]
    fn the_work_determines_counts_and_marks() {
        let structures = ",instructions=on,stores=on,barriers=on";
        let test = [("/x/kvm_page_table_test".into(), Vec::new())];
        for (line, tests, counts, is_marked_by_pid_1) in [
            ("lab -s 4k", &[][..], "", false),
            ("lab --test kvm_page_table_test", &test, "", true),
            ("guest -s 4k", &[], ",instructions=on", true),
            ("boot", &[], structures, false),
            ("boot --guest 4k", &[], structures, false),
            ("zap", &[], structures, false),
        ] {
            let job = matrix::jobs(&options(line), PageSize::Kib4, tests).remove(0);

            assert_eq!(job.work.counts(), counts, "{line}");
            assert_eq!(job.job.has_unmarked_program, is_marked_by_pid_1, "{line}");
        }
    }

    #[test]
    fn the_files_of_a_distribution_are_inputs() {
        let line = "guest --distribution /d -s 4k";
        let job = matrix::jobs(&options(line), PageSize::Kib4, &[]).remove(0);

        let files: Vec<_> = job.work.files().into_iter().map(|(_, file)| file).collect();

        assert_eq!(files, ["/d/vmlinuz", "/d/initrd.img", "/d/root.img"].map(Path::new));
    }
}
