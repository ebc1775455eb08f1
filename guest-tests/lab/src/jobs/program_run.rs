// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Runs of a user's program in the emulated host or in a guest, and their records.
//!
//! PID 1 of the machine that runs the program executes the mark of a program before it and the mark
//! of an end after it. The program may mark steps in between.

use std::path::PathBuf;

use granule_types::{
    backing::Backing,
    record::{GUEST_PROGRAM, HOST_PROGRAM, HostInfo, PROGRAM_OPTION, Record, RunConfig, SCHEMA},
    units::Bytes,
};

use crate::{
    host::program::{self, Program},
    options::ProgramMatrix,
};

/// Program of a job, and the configuration in its records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramRun {
    pub program: Program,
    pub argv: Vec<String>,
    engine: &'static str,
    config: RunConfig,
}

impl ProgramRun {
    fn new(matrix: &ProgramMatrix, engine: &'static str, config: RunConfig) -> Self {
        let argv = [&[program::PATH.to_owned()], matrix.arguments.as_slice()].concat();
        let mut run = Self { program: matrix.program.clone(), argv, engine, config };
        run.config.options.insert(PROGRAM_OPTION.to_owned(), run.program.name.clone());
        if !matrix.arguments.is_empty() {
            let arguments = matrix.arguments.join(" ");
            run.config.options.insert("arguments".to_owned(), arguments);
        }
        if !matrix.run_arg.is_empty() {
            let arguments = matrix.run_arg.join(" ");
            run.config.options.insert("run_arguments".to_owned(), arguments);
        }
        run
    }

    pub fn in_host(matrix: &ProgramMatrix, cpus: u32, seed: u64) -> Self {
        let config = RunConfig { vcpus: cpus, seed, ..RunConfig::default() };
        Self::new(matrix, HOST_PROGRAM, config)
    }

    pub fn in_guest(
        matrix: &ProgramMatrix,
        backing: Backing,
        memory: Bytes,
        vcpus: u32,
        seed: u64,
    ) -> Self {
        let config = RunConfig { backing, memory, vcpus, seed, ..RunConfig::default() };
        Self::new(matrix, GUEST_PROGRAM, config)
    }

    /// Returns the name of the program for a directory.
    pub fn name(&self) -> String {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._+-".contains(c);
        let name: String =
            self.program.name.chars().map(|c| if allowed(c) { c } else { '-' }).collect();
        format!("program-{name}")
    }

    /// Returns the source of the executable file.
    pub fn executable(&self) -> Option<&PathBuf> {
        let (_, source) = self.program.sources().find(|(path, _)| *path == program::PATH)?;
        Some(source)
    }

    pub fn is_in_guest(&self) -> bool {
        self.engine == GUEST_PROGRAM
    }

    /// Returns the fields that all records of a run share.
    pub fn record_head(&self, host: HostInfo) -> Record {
        Record {
            schema: SCHEMA.to_owned(),
            host,
            engine: self.engine.to_owned(),
            config: self.config.clone(),
            ..Record::default()
        }
    }
}
