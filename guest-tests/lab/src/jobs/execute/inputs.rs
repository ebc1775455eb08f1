// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Inputs of a job: everything that its results depend on, as hashes and as the files of PID 1.
//!
//! `outcome.json` of an ended job contains the hash of all inputs. A resumed run keeps the result of a
//! job whose inputs have the same hash.

use std::{collections::BTreeMap, path::Path};

use granule_types::host::HostFacts;

use super::Executor;
use crate::{command::CommandError, jobs::matrix::PlannedJob, kernel::Kernel, shell::sha256};

impl Executor {
    /// Returns the hash of everything that the results of a job depend on.
    pub fn inputs(&self, kernel: &Kernel, job: &PlannedJob) -> Result<String, CommandError> {
        let (job_text, facts_text) = self.texts(kernel, job)?;
        let plugin = job.machine.plugin_option(Path::new(""), Path::new(""));
        let mut text = format!(
            "{job_text}\n{facts_text}\n{:?}\n{:?}\n{plugin}\n{:?}\n{}\n{}",
            self.job_inputs(job)?,
            job.work.program(),
            kernel.functions,
            job.kernel_parameters,
            self.fails_on_splat
        );
        if let Some(check) = &self.check {
            // The findings depend on the checker, which is in this program. The link refers to it
            // even after it was rebuilt.
            let program = self.hashes.sha256(Path::new("/proc/self/exe"))?;
            text += &format!("\n{check:?} {program}");
        }
        if let Some(address) = job.work.guest().and_then(|vm| vm.guest.paging_function) {
            text += &format!("\n{address:x}");
        }
        Ok(sha256(text.as_bytes()))
    }

    /// Returns the SHA-256 of each input of a job, except for the kernel; `None` for a missing file.
    pub fn job_inputs(
        &self,
        job: &PlannedJob,
    ) -> Result<BTreeMap<String, Option<String>>, CommandError> {
        let text = serde_json::to_string(&job.job).map_err(unserializable)?;
        let mut inputs = BTreeMap::from([("job".to_owned(), Some(sha256(text.as_bytes())))]);
        let programs = [("init", &*self.init), ("plugin", &*self.plugin)];
        for (name, file) in programs.into_iter().chain(job.work.files()) {
            let hash = file.is_file().then(|| self.hashes.sha256(file)).transpose()?;
            inputs.insert(name.to_owned(), hash);
        }
        Ok(inputs)
    }

    /// Returns the contents of `job.json` and `facts.json`.
    pub(super) fn texts(
        &self,
        kernel: &Kernel,
        job: &PlannedJob,
    ) -> Result<(String, String), CommandError> {
        let facts = HostFacts {
            series: kernel.series.clone(),
            commit: kernel.commit.clone(),
            compiler: kernel.compiler.clone(),
            image_sha256: Some(kernel.image_sha256.clone()),
            emulator: Some(format!("{} {}", self.emulator_version, job.machine.describe())),
            cpu: Some(job.machine.cpu.clone()),
            ..HostFacts::default()
        };
        let job = serde_json::to_string(&job.job).map_err(unserializable)?;
        Ok((job, serde_json::to_string(&facts).map_err(unserializable)?))
    }
}

pub(super) fn unserializable(error: serde_json::Error) -> CommandError {
    CommandError::file("write", "job.json", error.into())
}
