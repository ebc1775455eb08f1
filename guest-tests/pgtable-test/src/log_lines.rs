// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Printed lines of a run. Lines for phases of `kvm_page_table_test` equal the lines of that test
//! in Linux 6.1, so that scripts can parse them; it calls `rebuild` adjust. All other lines begin
//! with `granule:`.

use std::io::{self, Write};

use crate::{harness::RunEvent, machine::Region};
use granule_types::record::{Record, RunConfig};

/// Printer of the lines of a run.
#[derive(Debug)]
pub struct LogLines<W> {
    output: W,
    config: RunConfig,
    iterations: u32,
}

impl<W: Write> LogLines<W> {
    /// Returns a printer for a run with this configuration.
    pub const fn new(output: W, config: RunConfig, iterations: u32) -> Self {
        Self { output, config, iterations }
    }

    /// Prints the lines of one event of the run and flushes them.
    ///
    /// # Errors
    /// Writing fails.
    pub fn print(&mut self, event: &RunEvent<'_>) -> io::Result<()> {
        match event {
            RunEvent::MachineReady(region) => self.print_header(region)?,
            RunEvent::VcpusStarted => writeln!(self.output, "Started all vCPUs successfully")?,
            RunEvent::IterationStarted(index) if self.iterations > 1 => {
                writeln!(self.output, "granule: iteration {} of {}", index + 1, self.iterations)?;
            }
            RunEvent::IterationStarted(_) => {}
            RunEvent::PhaseComplete(record) => self.print_phase(record)?,
        }
        self.output.flush()
    }

    fn print_header(&mut self, region: &Region) -> io::Result<()> {
        let Self { output, config, .. } = self;
        writeln!(output, "Testing guest mode: {}", config.mode)?;
        writeln!(output, "Testing memory backing src type: {}", config.backing)?;
        let page_size = region.backing_page_size.0;
        writeln!(output, "Testing memory backing src granularity: {page_size:#x}")?;
        writeln!(output, "Testing memory size(aligned): {:#x}", region.size.0)?;
        writeln!(output, "Guest physical test memory offset: {:#x}", region.start.0)?;
        writeln!(output, "Host  virtual  test memory offset: {:#x}", region.host_address.0)?;
        writeln!(output, "Number of testing vCPUs: {}", config.vcpus)
    }

    fn print_phase(&mut self, record: &Record) -> io::Result<()> {
        if let Some(round) = record.round {
            let count = |name| record.events.get(name).copied().unwrap_or(0);
            return writeln!(
                self.output,
                "granule: round {round}: {} writes, {} pages logged, collected in {}\n",
                count("guest_writes"),
                count("pages_logged"),
                record.ns
            );
        }
        match record.phase.kernel_test_name() {
            // The kernel's test prints the empty line, too.
            Some(word) => {
                writeln!(self.output, "KVM_{word}_MAPPINGS: total execution time: {}\n", record.ns)
            }
            None => writeln!(self.output, "granule: {} took {}\n", record.phase, record.ns),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::RunPlan;
    use granule_types::{
        backing::Backing,
        phase::Phase,
        units::{Bytes, GuestAddress, HostVirtAddr, Nanoseconds},
    };

    fn config() -> RunConfig {
        let backing = Backing::AnonymousHugetlb(Some(Bytes::mib(2)));
        let mode = "PA-bits:48,  VA-bits:48,  4K pages".to_owned();
        RunPlan::new(mode, backing, Bytes::mib(64), 16).config
    }

    fn record(phase: Phase) -> Record {
        Record {
            engine: "kvm".to_owned(),
            config: config(),
            phase,
            ns: Nanoseconds(42_188_640),
            ..Record::default()
        }
    }

    fn print_events(iterations: u32, events: &[RunEvent<'_>]) -> String {
        let mut lines = LogLines::new(Vec::new(), config(), iterations);
        for event in events {
            lines.print(event).unwrap();
        }
        String::from_utf8(lines.output).unwrap()
    }

    #[test]
    fn lines_equal_the_output_of_the_kernels_test() {
        let region = Region {
            start: GuestAddress(0xffff_fbff_f000),
            size: Bytes::mib(64),
            host_page_size: Bytes::kib(4),
            backing_page_size: Bytes::mib(2),
            host_address: HostVirtAddr(0xffff_7920_0000),
        };

        let text = print_events(
            1,
            &[
                RunEvent::MachineReady(&region),
                RunEvent::VcpusStarted,
                RunEvent::IterationStarted(0),
                RunEvent::PhaseComplete(&record(Phase::Create)),
                RunEvent::PhaseComplete(&record(Phase::Rebuild)),
            ],
        );

        assert_eq!(
            text,
            "Testing guest mode: PA-bits:48,  VA-bits:48,  4K pages\n\
             Testing memory backing src type: anonymous_hugetlb_2mb\n\
             Testing memory backing src granularity: 0x200000\n\
             Testing memory size(aligned): 0x4000000\n\
             Guest physical test memory offset: 0xfffffbfff000\n\
             Host  virtual  test memory offset: 0xffff79200000\n\
             Number of testing vCPUs: 16\n\
             Started all vCPUs successfully\n\
             KVM_CREATE_MAPPINGS: total execution time: 0.042188640s\n\n\
             KVM_ADJUST_MAPPINGS: total execution time: 0.042188640s\n\n"
        );
    }

    #[test]
    fn lines_that_the_kernels_test_does_not_print_begin_with_granule() {
        let record = record(Phase::Unmap);
        let text =
            print_events(2, &[RunEvent::IterationStarted(1), RunEvent::PhaseComplete(&record)]);

        assert_eq!(text, "granule: iteration 2 of 2\ngranule: unmap took 0.042188640s\n\n");
    }
}
