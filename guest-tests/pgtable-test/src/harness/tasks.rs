// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tasks of the vCPUs in each phase.
//!
//! The accesses of `create`, `update` and `rebuild` are those of the kernel's `kvm_page_table_test`
//! (Linux 6.1, `guest_code()`), with two differences:
//!
//! - written values depend on address and phase, so that contents can be verified;
//! - `update` writes every page of `shmem`, as of `anonymous`. The kernel's test treats a page of
//!   `shmem` as a block and advances by half a page, so it writes only the first half.

use crate::{
    machine::Region,
    task::{Task, TaskAccess},
};
use granule_types::{
    phase::Phase,
    splitmix64,
    units::{Bytes, GuestAddress},
};

#[derive(Debug, Clone, Copy)]
pub(super) struct Tasks {
    region: Region,
    seed: u64,
}

impl Tasks {
    pub(super) fn new(region: Region, seed: u64, iteration: u32) -> Self {
        Self { region, seed: splitmix64(seed ^ ((u64::from(iteration) + 1) << 32)) }
    }

    /// Returns a vCPU's task in a phase, which in host phases is [`TaskAccess::Nothing`].
    pub(super) fn for_vcpu(self, phase: Phase, vcpu: usize) -> Task {
        let blocks = self.writes_of(phase);
        match phase {
            Phase::Create if vcpu.is_multiple_of(2) => blocks,
            Phase::Create => with_access(TaskAccess::Read, blocks),
            Phase::Update => self.update_task(),
            Phase::Rebuild => {
                with_access(TaskAccess::Read, self.visit(self.region.host_page_size, 0))
            }
            Phase::Exec => with_access(TaskAccess::Execute, blocks),
            Phase::LoggingOn
            | Phase::LoggingOff
            | Phase::Unmap
            | Phase::Round
            | Phase::Stop
            | Phase::WholeRun
            | Phase::Step => self.idle_task(),
        }
    }

    pub(super) fn idle_task(self) -> Task {
        Task { count: 0, ..self.visit(self.region.host_page_size, 0) }
    }

    /// Returns the task that installs the instructions for [`Phase::Exec`].
    pub(super) fn install_return(self) -> Task {
        with_access(TaskAccess::InstallReturn, self.visit(self.region.backing_page_size, 0))
    }

    /// Returns the task that writes the vCPU's own word in random pages until a stop request.
    pub(super) fn write_at_random(self, vcpu: usize) -> Task {
        let pages = self.visit(self.region.host_page_size, 0);
        Task {
            access: TaskAccess::WriteAtRandom,
            start: GuestAddress(self.region.start.0 + 8 * vcpu as u64),
            seed: splitmix64(self.seed ^ !(vcpu as u64)),
            ..pages
        }
    }

    /// Returns the writes of a vCPU in `create` or `update`, without the reads after each write.
    pub(super) fn writes_of(self, phase: Phase) -> Task {
        let seed = splitmix64(self.seed ^ phase as u64);
        with_access(TaskAccess::Write, self.visit(self.region.backing_page_size, seed))
    }

    fn update_task(self) -> Task {
        let Region { host_page_size, backing_page_size, .. } = self.region;
        let blocks = self.writes_of(Phase::Update);
        if backing_page_size <= host_page_size {
            return blocks;
        }
        Task {
            access: TaskAccess::WriteThenRead,
            read_offset: Bytes(backing_page_size.0 / 2),
            read_count: backing_page_size.0 / host_page_size.0 / 2,
            read_stride: host_page_size,
            ..blocks
        }
    }

    fn visit(self, stride: Bytes, seed: u64) -> Task {
        let count = self.region.size.0 / stride.0;
        Task { seed, ..Task::new(TaskAccess::Nothing, self.region.start, count, stride) }
    }
}

const fn with_access(access: TaskAccess, task: Task) -> Task {
    Task { access, ..task }
}

#[cfg(test)]
mod tests {
    use super::*;
    use granule_types::units::HostVirtAddr;

    fn tasks(backing_page_size: Bytes) -> Tasks {
        let region = Region {
            start: GuestAddress(0xffff_e000_0000),
            size: Bytes::mib(64),
            host_page_size: Bytes::kib(4),
            backing_page_size,
            host_address: HostVirtAddr(0),
        };
        Tasks::new(region, 0, 0)
    }

    #[test]
    fn accesses_and_strides_equal_the_kernels_test() {
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
            (update.read_offset, update.read_count, update.read_stride),
            (Bytes::mib(1), 256, Bytes::kib(4))
        );
    }

    #[test]
    fn returns_are_installed_at_the_executed_addresses() {
        let tasks = tasks(Bytes::mib(2));

        let (install, exec) = (tasks.install_return(), tasks.for_vcpu(Phase::Exec, 5));

        assert_eq!((install.start, install.count), (exec.start, exec.count));
        assert_eq!(install.stride, exec.stride);
    }

    #[test]
    fn written_values_differ_between_phases_and_iterations() {
        let tasks = tasks(Bytes::mib(2));
        let next = Tasks::new(tasks.region, 0, 1);

        let seeds = [
            tasks.writes_of(Phase::Create).seed,
            tasks.writes_of(Phase::Update).seed,
            next.writes_of(Phase::Create).seed,
        ];

        assert!(seeds[0] != seeds[1] && seeds[0] != seeds[2] && seeds[1] != seeds[2]);
    }
}
