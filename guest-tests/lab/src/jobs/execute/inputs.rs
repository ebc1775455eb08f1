// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Inputs of a job: everything that its results depend on, as hashes and as the files of PID 1.
//!
//! `outcome.json` of an ended job contains the hash of all inputs. A resumed run keeps the result of a
//! job whose inputs have the same hash.

use std::{collections::BTreeMap, path::Path};

use granule_types::{host::HostFacts, record};

use super::Executor;
use crate::{
    command::CommandError,
    jobs::{matrix::PlannedJob, work::Work},
    kernel::Kernel,
    shell::sha256,
};

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

    /// Returns the SHA-256 of the programs that make the results of a job, by their names in records.
    pub(super) fn programs(
        &self,
        job: &PlannedJob,
    ) -> Result<BTreeMap<String, String>, CommandError> {
        let further = match &job.work {
            Work::KernelTest(test) => Some((record::KERNEL_TEST, test)),
            work => work.program().and_then(|run| Some((record::USER_PROGRAM, run.executable()?))),
        };
        [(record::GRANULE, &self.init), (record::PLUGIN, &self.plugin)]
            .into_iter()
            .chain(further)
            .map(|(name, file)| Ok((name.to_owned(), self.hashes.sha256(file)?)))
            .collect()
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

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf};

    use super::*;
    use crate::{
        host::program::{Program, tests::arm64_program},
        jobs::{
            execute::tests::executor,
            matrix::{self, tests::options},
            program_run::ProgramRun,
        },
        options::{ProgramMatrix, ProgramPlace, Workload},
        values::PageSize,
    };

    /// Returns the work that runs a user's program in the host.
    fn user_program(path: &Path) -> Work {
        let Workload::PageTableTest(matrix) = options("lab").workload else { panic!() };
        let matrix = ProgramMatrix {
            program: Program::open(path).unwrap(),
            place: ProgramPlace::Host,
            load: matrix.load,
            run_arg: Vec::new(),
            arguments: Vec::new(),
        };
        Work::Program(ProgramRun::in_host(&matrix, 1, 0))
    }

    #[test]
    fn each_program_of_a_job_has_its_digest() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str, content: &[u8]| -> PathBuf {
            let path = directory.path().join(name);
            fs::write(&path, content).unwrap();
            path
        };
        let (init, plugin) = (file("init", b"init"), file("plugin", b"plugin"));
        let executor = Executor { init, plugin, ..executor() };
        let further = |work: Work| {
            let mut job = matrix::jobs(&options("lab -s 4k"), PageSize::Kib4, &[]).remove(0);
            job.work = work;
            let mut programs = executor.programs(&job).unwrap();
            let of_all = [record::GRANULE, record::PLUGIN].map(|name| programs.remove(name));
            assert_eq!(of_all, [Some(sha256(b"init")), Some(sha256(b"plugin"))]);
            programs
        };

        let bench = further(Work::Bench);
        let kernel_test = further(Work::KernelTest(file("test", b"test")));
        let user = further(user_program(&file("user", &arm64_program())));

        assert_eq!(bench, BTreeMap::new());
        assert_eq!(kernel_test, [(record::KERNEL_TEST.to_owned(), sha256(b"test"))].into());
        assert_eq!(user, [(record::USER_PROGRAM.to_owned(), sha256(&arm64_program()))].into());
    }
}
