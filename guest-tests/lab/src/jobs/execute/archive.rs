// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Contents of the initramfs of a job, and of that of its guest.
//!
//! ```text
//! /init                     the static arm64 `granule`
//! /job.json, /facts.json    input of PID 1
//! /test                     program of the kernel's tree
//! /workload/                user's program or VMM
//! /guest.image, /guest.cpio kernel and initramfs of a guest: of a distribution, or the host's
//!                           kernel, and the same /init with a file that names its purpose
//! ```

use super::{Executor, inputs::unserializable};
use crate::{
    command::CommandError,
    host::{
        guest_init,
        initramfs::ArchiveEntry,
        job::{FACTS_PATH, JOB_PATH, KERNEL_TEST_PATH},
    },
    jobs::{
        guest::LinuxGuest,
        matrix::PlannedJob,
        work::{GuestPurpose, GuestVm, Work},
    },
    kernel::Kernel,
};

impl Executor {
    /// Returns the entries of the initramfs of a job; `texts` are those of `job.json` and
    /// `facts.json`.
    pub(super) fn initramfs_contents<'a>(
        &self,
        kernel: &Kernel,
        job: &PlannedJob,
        (job_text, facts_text): (&'a str, &'a str),
        guest_text: &'a str,
    ) -> Vec<ArchiveEntry<'a>> {
        let mut contents = vec![ArchiveEntry::program("/init", &self.init)];
        match &job.work {
            Work::Bench | Work::Boot { .. } | Work::Zap(_) => {}
            Work::KernelTest(test) => {
                contents.push(ArchiveEntry::program(KERNEL_TEST_PATH, test));
            }
            Work::Program(run) => contents.extend(run.program.entries()),
            Work::Guest(vm) => {
                contents.extend(self.guest_files(kernel, vm, guest_text));
                if let GuestPurpose::UserVmm(vmm) = &vm.purpose {
                    contents.extend(vmm.entries());
                }
            }
        }
        contents.push(ArchiveEntry::text(JOB_PATH, job_text));
        contents.push(ArchiveEntry::text(FACTS_PATH, facts_text));
        contents
    }

    /// Returns the boot files of a guest.
    fn guest_files<'a>(
        &self,
        kernel: &Kernel,
        vm: &GuestVm,
        guest_text: &'a str,
    ) -> Vec<ArchiveEntry<'a>> {
        let files = &vm.guest.files;
        if !files.is_empty() {
            return files.iter().map(|(file, path)| ArchiveEntry::file(*path, file)).collect();
        }
        let mut inner = vec![ArchiveEntry::program("/init", &self.init)];
        if let GuestPurpose::Program(run) = &vm.purpose {
            inner.extend(run.program.entries());
        }
        inner.push(ArchiveEntry::text(guest_init::MARKER_PATH, guest_text));
        vec![
            ArchiveEntry::file(LinuxGuest::IMAGE_PATH, &kernel.image),
            ArchiveEntry::archive(LinuxGuest::INITRD_PATH, inner),
        ]
    }
}

/// Returns the content of the file that names the purpose of a guest for its PID 1.
pub(super) fn guest_text(work: &Work) -> Result<String, CommandError> {
    let Work::Guest(vm) = work else { return Ok(String::new()) };
    Ok(match &vm.purpose {
        GuestPurpose::Checks => String::new(),
        GuestPurpose::UserVmm(_) => guest_init::MARKED_INIT.to_owned(),
        GuestPurpose::Program(run) => serde_json::to_string(&run.argv).map_err(unserializable)?,
        GuestPurpose::KernelTables(_) => guest_init::KERNEL_TABLES.to_owned(),
    })
}
