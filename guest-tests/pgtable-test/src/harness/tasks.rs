// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The task of each vCPU in each phase.
//!
//! The accesses of `create`, `update` and `rebuild` are those of the kernel's `kvm_page_table_test`
//! (Linux 6.1, `guest_code()`), with two differences:
//!
//! - written values depend on address and phase, so that contents can be verified;
//! - `update` writes every small page of `shmem`, as with `anonymous`. The kernel's test treats a
//!   small page as a block, advances by half a page at a time, and so writes the first half of the
//!   region twice and the second half never.

use crate::{
    machine::Region,
    task::{Task, TaskAccess},
};
use granule_types::{
    mix,
    phase::Phase,
    units::{Bytes, GuestAddress},
};

#[derive(Debug, Clone, Copy)]
pub(super) struct Tasks {
    region: Region,
    seed: u64,
}

impl Tasks {
    pub(super) fn new(region: Region, seed: u64, iteration: u32) -> Self {
        Self { region, seed: mix(seed ^ ((u64::from(iteration) + 1) << 32)) }
    }

    /// Returns a vCPU's task in a phase; [`TaskAccess::Nothing`] in phases in which no vCPU works.
    pub(super) fn for_vcpu(self, phase: Phase, vcpu: usize) -> Task {
        let blocks = self.written_by(phase);
        match phase {
            Phase::Create if vcpu.is_multiple_of(2) => blocks,
            Phase::Create => with(TaskAccess::Read, blocks),
            Phase::Update => self.update(),
            Phase::Rebuild => with(TaskAccess::Read, self.walk(self.region.host_page, 0)),
            Phase::Exec => with(TaskAccess::Execute, blocks),
            Phase::LoggingOn
            | Phase::LoggingOff
            | Phase::Unmap
            | Phase::Round
            | Phase::Stop
            | Phase::Whole => self.nothing(),
        }
    }

    pub(super) fn nothing(self) -> Task {
        Task { count: 0, ..self.walk(self.region.host_page, 0) }
    }

    /// Returns the task that plants the instructions of [`Phase::Exec`].
    pub(super) fn plant(self) -> Task {
        with(TaskAccess::Plant, self.walk(self.region.backing_page, 0))
    }

    /// Returns the task that writes the vCPU's own word in random pages until it is stopped.
    pub(super) fn write_at_random(self, vcpu: usize) -> Task {
        let pages = self.walk(self.region.host_page, 0);
        Task {
            access: TaskAccess::WriteAtRandom,
            start: GuestAddress(self.region.start.0 + 8 * vcpu as u64),
            seed: mix(self.seed ^ !(vcpu as u64)),
            ..pages
        }
    }

    /// Returns the task that writes what a vCPU writes in `create` or `update`.
    pub(super) fn written_by(self, phase: Phase) -> Task {
        let seed = mix(self.seed ^ phase as u64);
        with(TaskAccess::Write, self.walk(self.region.backing_page, seed))
    }

    fn update(self) -> Task {
        let Region { host_page, backing_page, .. } = self.region;
        let blocks = self.written_by(Phase::Update);
        if backing_page <= host_page {
            return blocks;
        }
        Task {
            access: TaskAccess::WriteThenRead,
            inner_first: Bytes(backing_page.0 / 2),
            inner_count: backing_page.0 / host_page.0 / 2,
            inner_stride: host_page,
            ..blocks
        }
    }

    fn walk(self, stride: Bytes, seed: u64) -> Task {
        let count = self.region.size.0 / stride.0;
        Task { seed, ..Task::new(TaskAccess::Nothing, self.region.start, count, stride) }
    }
}

const fn with(access: TaskAccess, task: Task) -> Task {
    Task { access, ..task }
}

#[cfg(test)]
mod tests {
    use super::*;
    use granule_types::units::HostVirtAddr;

    fn tasks(backing_page: Bytes) -> Tasks {
        let region = Region {
            start: GuestAddress(0xffff_e000_0000),
            size: Bytes::mib(64),
            host_page: Bytes::kib(4),
            backing_page,
            host_address: HostVirtAddr(0),
        };
        Tasks::new(region, 0, 0)
    }

    #[test]
    fn accesses_and_strides_are_those_of_the_kernels_test() {
        let (small, large, rebuild) = (Bytes::kib(4), Bytes::mib(2), Phase::Rebuild);
        for (page, phase, vcpu, access, count, stride) in [
            (large, Phase::Create, 0, TaskAccess::Write, 32, large),
            (large, Phase::Create, 1, TaskAccess::Read, 32, large),
            (large, Phase::Update, 3, TaskAccess::WriteThenRead, 32, large),
            (small, Phase::Update, 0, TaskAccess::Write, 16384, small),
            (large, rebuild, 0, TaskAccess::Read, 16384, small),
        ] {
            let task = tasks(page).for_vcpu(phase, vcpu);

            assert_eq!((task.access, task.count, task.stride), (access, count, stride), "{phase}");
        }
    }

    #[test]
    fn update_reads_the_second_half_of_a_block_after_its_write() {
        let update = tasks(Bytes::mib(2)).for_vcpu(Phase::Update, 3);

        assert_eq!(
            (update.inner_first, update.inner_count, update.inner_stride),
            (Bytes::mib(1), 256, Bytes::kib(4))
        );
    }

    #[test]
    fn instructions_are_planted_at_the_executed_addresses() {
        let tasks = tasks(Bytes::mib(2));

        let (plant, exec) = (tasks.plant(), tasks.for_vcpu(Phase::Exec, 5));

        assert_eq!((plant.start, plant.count), (exec.start, exec.count));
        assert_eq!(plant.stride, exec.stride);
    }

    #[test]
    fn written_values_differ_between_phases_and_iterations() {
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
