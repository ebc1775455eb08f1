// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What each vCPU does in each phase.
//!
//! The accesses of `create`, `update` and `rebuild` are those of the kernel's `kvm_page_table_test`
//! (Linux 6.1, `guest_code()`), but for two points:
//!
//! - written values differ from place to place and from phase to phase, so that contents can be
//!   verified;
//! - in `update` every small page of `shmem` is written, as with `anonymous`. The kernel's test
//!   treats it as one block of one page, moves on by half a page each time, and so writes the first
//!   half of the region twice and the second half never.

use crate::machine::{Access, Region, Task};
use granule_types::mix::mix;
use granule_types::{
    phase::Phase,
    units::{Bytes, GuestAddress},
};

/// Places that hold known values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Written {
    pub(super) start: GuestAddress,
    pub(super) count: u64,
    pub(super) stride: Bytes,
    pub(super) seed: u64,
}

impl Written {
    pub(super) fn addresses(self) -> impl Iterator<Item = GuestAddress> {
        (0..self.count).map(move |place| GuestAddress(self.start.0 + place * self.stride.0))
    }
}

/// The tasks of one iteration in a region.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tasks {
    region: Region,
    seed: u64,
}

impl Tasks {
    pub(super) const fn new(region: Region, seed: u64, iteration: u32) -> Self {
        Self {
            region,
            seed: mix(seed ^ ((iteration as u64 + 1) << 32)),
        }
    }

    /// A vCPU's task in a phase in which vCPUs work; [`Access::Nothing`] in the others.
    pub(super) fn of(self, phase: Phase, vcpu: usize) -> Task {
        let blocks = self.walk(self.region.backing_page, self.written_by(phase).seed);
        match phase {
            Phase::Create if vcpu.is_multiple_of(2) => with(Access::Write, blocks),
            Phase::Create => with(Access::Read, blocks),
            Phase::Update => self.update(),
            Phase::Rebuild => with(Access::Read, self.walk(self.region.host_page, 0)),
            Phase::Exec => with(Access::Execute, blocks),
            Phase::LoggingOn
            | Phase::LoggingOff
            | Phase::Unmap
            | Phase::Round
            | Phase::Stop
            | Phase::Whole => self.nothing(),
        }
    }

    /// Comes back at once.
    pub(super) fn nothing(self) -> Task {
        Task {
            count: 0,
            ..self.walk(self.region.host_page, 0)
        }
    }

    /// Plants what [`Phase::Exec`] calls.
    pub(super) fn plant(self) -> Task {
        with(Access::Plant, self.walk(self.region.backing_page, 0))
    }

    /// Writes a word of the vCPU's own in pages at random, until it is told to stop.
    pub(super) fn write_at_random(self, vcpu: usize) -> Task {
        let pages = self.walk(self.region.host_page, 0);
        Task {
            access: Access::WriteAtRandom,
            start: GuestAddress(self.region.start.0 + 8 * vcpu as u64),
            seed: mix(self.seed ^ !(vcpu as u64)),
            ..pages
        }
    }

    /// Verifies what was written.
    pub(super) fn verify(self, written: Written) -> Task {
        Task {
            access: Access::Verify,
            start: written.start,
            count: written.count,
            stride: written.stride,
            ..self.walk(self.region.host_page, written.seed)
        }
    }

    /// What holds known values once `create` or `update` is done.
    pub(super) fn written_by(self, phase: Phase) -> Written {
        let stride = self.region.backing_page;
        Written {
            start: self.region.start,
            count: self.region.size.0 / stride.0,
            stride,
            seed: mix(self.seed ^ phase as u64),
        }
    }

    fn update(self) -> Task {
        let Region {
            host_page,
            backing_page,
            ..
        } = self.region;
        let blocks = self.walk(backing_page, self.written_by(Phase::Update).seed);
        if backing_page <= host_page {
            return with(Access::Write, blocks);
        }
        Task {
            access: Access::WriteThenRead,
            inner_first: Bytes(backing_page.0 / 2),
            inner_count: backing_page.0 / host_page.0 / 2,
            inner_stride: host_page,
            ..blocks
        }
    }

    fn walk(self, stride: Bytes, seed: u64) -> Task {
        Task {
            access: Access::Nothing,
            start: self.region.start,
            count: self.region.size.0 / stride.0,
            stride,
            inner_first: Bytes(0),
            inner_count: 0,
            inner_stride: Bytes(0),
            seed,
        }
    }
}

const fn with(access: Access, task: Task) -> Task {
    Task { access, ..task }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tasks(backing_page: Bytes) -> Tasks {
        let region = Region {
            start: GuestAddress(0xffff_e000_0000),
            size: Bytes::mib(64),
            host_page: Bytes::kib(4),
            backing_page,
            host_address: None,
        };
        Tasks::new(region, 0, 0)
    }

    #[test]
    fn even_vcpus_write_and_odd_ones_read_every_backing_page() {
        let tasks = tasks(Bytes::mib(2));

        let (even, odd) = (tasks.of(Phase::Create, 0), tasks.of(Phase::Create, 1));

        assert_eq!((even.access, odd.access), (Access::Write, Access::Read));
        assert_eq!((even.count, even.stride), (32, Bytes::mib(2)));
    }

    #[test]
    fn update_splits_a_block_and_reads_its_second_half() {
        let update = tasks(Bytes::mib(2)).of(Phase::Update, 3);

        assert_eq!(update.access, Access::WriteThenRead);
        assert_eq!(
            (update.inner_first, update.inner_count, update.inner_stride),
            (Bytes::mib(1), 256, Bytes::kib(4))
        );
    }

    #[test]
    fn update_writes_every_small_page() {
        let update = tasks(Bytes::kib(4)).of(Phase::Update, 0);

        assert_eq!((update.access, update.count), (Access::Write, 16384));
    }

    #[test]
    fn rebuild_reads_every_host_page() {
        let rebuild = tasks(Bytes::mib(2)).of(Phase::Rebuild, 0);

        assert_eq!(
            (rebuild.access, rebuild.count, rebuild.stride),
            (Access::Read, 16384, Bytes::kib(4))
        );
    }

    #[test]
    fn instructions_are_planted_where_they_are_called() {
        let tasks = tasks(Bytes::mib(2));

        let (plant, exec) = (tasks.plant(), tasks.of(Phase::Exec, 5));

        assert_eq!((plant.start, plant.count), (exec.start, exec.count));
        assert_eq!(plant.stride, exec.stride);
    }

    #[test]
    fn no_phase_or_iteration_writes_what_another_wrote() {
        let tasks = tasks(Bytes::mib(2));
        let next = Tasks::new(tasks.region, 0, 1);

        let seeds = [
            tasks.written_by(Phase::Create).seed,
            tasks.written_by(Phase::Update).seed,
            next.written_by(Phase::Create).seed,
        ];

        assert!(seeds[0] != seeds[1] && seeds[0] != seeds[2] && seeds[1] != seeds[2]);
    }
}
