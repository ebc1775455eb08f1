// SPDX-License-Identifier: GPL-2.0-or-later
//! The events of a trace in their order, with as few lines as that order allows.

use std::{
    io::{self, Write},
    mem,
};

use granule_stage2::{
    PhysAddr,
    check::machine::event::{MachineAction, MachineEvent},
};

use super::{
    barrier::{Barrier, RecentBarriers},
    cache_operations::{Line, LineRuns},
    call_stack::{CallStacks, walk},
    machine::Machine,
    writer::TraceWriter,
};

/// A trace that is being written.
#[derive(Debug)]
pub struct Trace {
    writer: TraceWriter,
    runs: LineRuns,
    barriers: Vec<RecentBarriers>,
    /// The last thread of each CPU.
    threads: Vec<u64>,
    /// Call stacks, if they are reported.
    stacks: Option<CallStacks>,
}

impl Trace {
    /// Returns a trace of `cpus` CPUs.
    pub fn new(out: Box<dyn Write + Send>, cpus: usize, has_stacks: bool) -> Self {
        Self {
            writer: TraceWriter::new(out),
            runs: LineRuns::default(),
            barriers: (0..cpus).map(|_| RecentBarriers::default()).collect(),
            threads: vec![0; cpus],
            stacks: has_stacks.then(CallStacks::default),
        }
    }

    /// Returns the number of the call stack of a CPU, and defines it if it is new.
    pub fn stack(&mut self, machine: &dyn Machine, cpu: u8, address: u64) -> Option<u32> {
        let stack = walk(machine, address);
        let (number, is_new) = self.stacks.as_mut()?.number(&stack);
        if is_new {
            let action = MachineAction::Stack(number, stack);
            self.writer.event(&MachineEvent { cpu, action, stack: None });
        }
        Some(number)
    }

    /// Writes that a CPU executes a thread, unless it is the last one.
    pub fn thread(&mut self, cpu: u8, thread: u64) {
        if mem::replace(&mut self.threads[usize::from(cpu)], thread) != thread {
            self.emit(cpu, MachineAction::Thread(thread), None);
        }
    }

    /// Writes an event.
    pub fn emit(&mut self, cpu: u8, action: MachineAction, stack: Option<u32>) {
        self.write_runs();
        self.write(cpu, action, stack);
    }

    /// Writes a barrier, unless it adds nothing to those since the last event of this CPU.
    pub fn barrier(&mut self, cpu: u8, barrier: Barrier) {
        if self.runs.has_run(cpu) {
            self.write_runs();
        }
        if self.barriers[usize::from(cpu)].record(barrier) {
            self.write_runs();
            self.writer.event(&MachineEvent { cpu, action: barrier.action(), stack: None });
        }
    }

    /// Records cache maintenance of a line by the instruction at `address`.
    pub fn line(
        &mut self,
        machine: &dyn Machine,
        (cpu, address): (u8, u64),
        line: Line,
        thread: impl FnOnce() -> Option<u64>,
    ) {
        if self.runs.extend(cpu, line) {
            return;
        }
        if let Some(run) = self.runs.take(cpu) {
            self.write(cpu, run.action(), run.stack);
        }
        if let Some(thread) = thread() {
            self.thread(cpu, thread);
        }
        let stack = self.stack(machine, cpu, address);
        self.runs.start((cpu, stack), line);
    }

    /// Returns the physical address of a line in the page of the last one, if it is known.
    pub fn translate_line(&self, cpu: u8, virt: u64) -> Option<PhysAddr> {
        self.runs.translate(cpu, virt)
    }

    /// Counts what is not reported.
    pub fn skip(&mut self, what: &str) {
        self.writer.skip(what);
    }

    /// Writes a comment.
    pub fn comment(&mut self, text: std::fmt::Arguments<'_>) {
        self.writer.comment(text);
    }

    /// Ends the trace.
    ///
    /// # Errors
    /// A line cannot be written.
    pub fn finish(&mut self) -> io::Result<()> {
        self.write_runs();
        self.writer.finish()
    }

    /// Writes the cache maintenance that is not yet reported.
    pub fn write_runs(&mut self) {
        for run in self.runs.take_all() {
            self.write(run.cpu, run.action(), run.stack);
        }
    }

    fn write(&mut self, cpu: u8, action: MachineAction, stack: Option<u32>) {
        self.barriers[usize::from(cpu)].clear();
        self.writer.event(&MachineEvent { cpu, action, stack });
    }
}
