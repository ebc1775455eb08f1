// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The command of the emulator for one boot, with the arguments of the plugin.

use std::path::Path;

use super::{CONSOLE_FILE, COUNTS_FILE, Executor, INITRAMFS_FILE};
use crate::{
    command::Command,
    host::emulator::{kernel_command_line, path_option},
    jobs::{matrix::PlannedJob, observed_kernel::ObservedKernel},
    kernel::Kernel,
};

impl Executor {
    /// Returns the command of the emulator with additional arguments of the plugin.
    pub(super) fn command(
        &self,
        (kernel, job): (&Kernel, &PlannedJob),
        directory: &Path,
        observed: Option<&ObservedKernel>,
        plugin_arguments: &str,
    ) -> Command {
        let machine = &job.machine;
        let mut plugin = machine.plugin_option(&self.plugin, &directory.join(COUNTS_FILE));
        plugin += &format!(",seed={}", job.job.seed);
        plugin += job.work.counts();
        plugin += plugin_arguments;
        for (name, address) in &kernel.functions {
            plugin += &format!(",at={name}:{address:x}");
        }
        if let Some(observed) = observed {
            plugin += &observed.plugin_arguments(directory);
        }
        let console = path_option("file,id=console,path=", &directory.join(CONSOLE_FILE));
        machine
            .emulator(&self.qemu)
            .args(["-chardev", &console, "-serial", "chardev:console", "-plugin", &plugin])
            .arg("-kernel")
            .arg(&kernel.image)
            .arg("-initrd")
            .arg(directory.join(INITRAMFS_FILE))
            .args(["-append", &kernel_command_line(&job.kernel_parameters)])
            .log(directory.join("emulator.log"))
            .deadline(self.deadline)
    }
}
