// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A kernel whose tables are checked while a job runs.

use std::{fs, path::Path};

use crate::{
    check::{
        Hardware, Places, Setup,
        code::Code,
        hypervisor::{Hypervisor, KernelCheck},
        observation::{Check, FIFO, observe},
    },
    command::CommandError,
    host::emulator::path_option,
    jobs::matrix::PlannedJob,
    kernel::Kernel,
    shell,
    values::{LinuxVersion, PageSize},
};

/// Functions of a kernel that the checker has to observe.
#[derive(Debug)]
pub struct ObservedKernel {
    version: LinuxVersion,
    page_size: PageSize,
    places: Places,
    hypervisor: Hypervisor,
}

impl ObservedKernel {
    /// Reads version and symbols of a kernel. A kernel that is not built yet, in a dry run, has none.
    ///
    /// # Errors
    /// A file cannot be read, or the kernel has no `System.map`.
    pub fn open(kernel: &Kernel, check: KernelCheck) -> Result<Self, CommandError> {
        let is_built = kernel.image.is_file();
        let map = match (&kernel.system_map, is_built) {
            (Some(path), _) => {
                fs::read(path).map_err(|error| CommandError::file("read", path, error))?
            }
            (None, false) => Vec::new(),
            (None, true) => {
                let missing = std::io::Error::new(
                    std::io::ErrorKind::NotFound,
                    "the checker needs the System.map of the kernel beside its image",
                );
                return Err(CommandError::file("check", &kernel.image, missing));
            }
        };
        let version = if is_built { kernel.version()? } else { LinuxVersion::OLDEST };
        let mut places = Places::of_system_map(&String::from_utf8_lossy(&map));
        if let Some(vmlinux) = &kernel.vmlinux {
            places = places.with_vmlinux(vmlinux);
        }
        let image = if is_built { shell::read(&kernel.image)? } else { Vec::new() };
        let code = Code { symbols: places.symbols(), image: &image };
        let hypervisor = Hypervisor::new(version, code, check);
        Ok(Self { version, page_size: kernel.page_size, places, hypervisor })
    }

    /// Returns the arguments of the plugin for the trace of a job, each after a comma.
    pub fn plugin_arguments(&self, directory: &Path) -> String {
        path_option(",trace=", &directory.join(FIFO)) + &self.hypervisor.plugin_arguments()
    }

    /// Runs the emulator of a job and checks its trace.
    ///
    /// # Errors
    /// The findings cannot be written.
    pub fn run<T>(
        &self,
        job: &PlannedJob,
        directory: &Path,
        keeps_trace: bool,
        emulator: impl FnOnce() -> T,
    ) -> Result<T, CommandError> {
        let machine = &job.machine;
        let hardware = Hardware { cpu: &machine.cpu, cpus: machine.cpus, memory: machine.memory };
        let setup = Setup::new(self.version, self.page_size, &self.hypervisor, hardware);
        observe(Check::new(setup, &self.places), directory, keeps_trace, emulator)
    }
}
