// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The printed lines. Lines for phases of the kernel's `kvm_page_table_test` equal the kernel's
//! (Linux 6.1), so that scripts for that test can read them; `rebuild` is the kernel's adjust. All
//! other lines begin with `granule:`, which no such script matches.

use std::io::{self, Write};

use crate::{harness::RunEvent, machine::Region};
use granule_types::record::{Record, RunConfig};

/// Printer of the lines of a run.
#[derive(Debug)]
pub struct LogLines<W> {
    to: W,
    config: RunConfig,
    iterations: u32,
}

impl<W: Write> LogLines<W> {
    /// Returns a printer of a run with this configuration.
    pub const fn new(to: W, config: RunConfig, iterations: u32) -> Self {
        Self { to, config, iterations }
    }

    /// Prints the lines of one event of the run and flushes them.
    ///
    /// # Errors
    /// Writing fails.
    pub fn print(&mut self, progress: &RunEvent<'_>) -> io::Result<()> {
        match progress {
            RunEvent::Ready(region) => self.head(region)?,
            RunEvent::Started => writeln!(self.to, "Started all vCPUs successfully")?,
            RunEvent::Iteration(index) if self.iterations > 1 => {
                writeln!(self.to, "granule: iteration {} of {}", index + 1, self.iterations)?;
            }
            RunEvent::Iteration(_) => {}
            RunEvent::Phase(record) => self.phase(record)?,
        }
        self.to.flush()
    }

    fn head(&mut self, region: &Region) -> io::Result<()> {
        let Self { to, config, .. } = self;
        writeln!(to, "Testing guest mode: {}", config.mode)?;
        writeln!(to, "Testing memory backing src type: {}", config.backing)?;
        writeln!(to, "Testing memory backing src granularity: {:#x}", region.backing_page.0)?;
        writeln!(to, "Testing memory size(aligned): {:#x}", region.size.0)?;
        writeln!(to, "Guest physical test memory offset: {:#x}", region.start.0)?;
        writeln!(to, "Host  virtual  test memory offset: {:#x}", region.host_address.0)?;
        writeln!(to, "Number of testing vCPUs: {}", config.vcpus)
    }

    fn phase(&mut self, record: &Record) -> io::Result<()> {
        if let Some(round) = record.round {
            let count = |name| record.events.get(name).copied().unwrap_or(0);
            return writeln!(
                self.to,
                "granule: round {round}: {} writes, {} pages logged, collected in {}\n",
                count("guest_writes"),
                count("pages_logged"),
                record.ns
            );
        }
        match record.phase.kernel_word() {
            // The kernel's test prints the empty line, too.
            Some(word) => {
                writeln!(self.to, "KVM_{word}_MAPPINGS: total execution time: {}\n", record.ns)
            }
            None => writeln!(self.to, "granule: {} took {}\n", record.phase, record.ns),
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

    fn printed(iterations: u32, events: &[RunEvent<'_>]) -> String {
        let mut lines = LogLines::new(Vec::new(), config(), iterations);
        for event in events {
            lines.print(event).unwrap();
        }
        String::from_utf8(lines.to).unwrap()
    }

    #[test]
    fn lines_equal_those_of_the_kernels_test() {
        let region = Region {
            start: GuestAddress(0xffff_fbff_f000),
            size: Bytes::mib(64),
            host_page: Bytes::kib(4),
            backing_page: Bytes::mib(2),
            host_address: HostVirtAddr(0xffff_7920_0000),
        };

        let text = printed(
            1,
            &[
                RunEvent::Ready(&region),
                RunEvent::Started,
                RunEvent::Iteration(0),
                RunEvent::Phase(&record(Phase::Create)),
                RunEvent::Phase(&record(Phase::Rebuild)),
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
    fn other_lines_do_not_look_like_the_kernels() {
        let text = printed(2, &[RunEvent::Iteration(1), RunEvent::Phase(&record(Phase::Unmap))]);

        assert_eq!(text, "granule: iteration 2 of 2\ngranule: unmap took 0.042188640s\n\n");
    }
}
