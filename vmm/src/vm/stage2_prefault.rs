// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Populates stage 2 of a VM, before the guest starts or beside it.
//!
//! The memory is aligned, advised and, before the guest starts, populated when it is
//! [allocated](super::builder). Its stage 2 is populated after the boot data are written. Beside the
//! running guest, one thread populates host memory and stage 2, chunk by chunk, through a vCPU that
//! never runs.

use std::{
    io,
    sync::{Arc, Once},
};

use granule_types::error_text;
use kvm_ioctls::VmFd;

use super::{
    config::Stage2Prefault,
    outcome::{VmError, failed},
};
use crate::{
    arch::guest::GuestVcpus,
    kvm::pre_fault::{Stage2Populator, chunks_of},
    memory::{GuestMemory, GuestRam},
    scoped_thread::{ScopedThread, is_stop_requested},
};

/// Populates stage 2, or starts the thread that does.
pub fn start(
    mode: Stage2Prefault,
    vm: &VmFd,
    vcpus: &GuestVcpus,
    memory: &GuestMemory,
) -> Result<Option<ScopedThread>, VmError> {
    let fds = match mode {
        Stage2Prefault::BeforeStart => vcpus.fds.as_slice(),
        Stage2Prefault::Background => vcpus.helper.as_slice(),
    };
    let mut populator = Stage2Populator::new(vm);
    match &mut populator {
        None => warn_unsupported(),
        Some(populator) => fds.iter().try_for_each(|vcpu| populator.add_vcpu(vcpu))?,
    }
    match (mode, populator) {
        (Stage2Prefault::BeforeStart, None) => Ok(None),
        (Stage2Prefault::BeforeStart, Some(populator)) => {
            // It only saves faults.
            if let Err(error) = populator.populate(memory.regions()) {
                log::warn!(
                    "--prefault stage2: the rest is populated by faults: {}",
                    error_text(&error)
                );
            }
            Ok(None)
        }
        (Stage2Prefault::Background, populator) => {
            let memory = memory.clone();
            let thread = ScopedThread::start("prefault", move |stop| {
                let is_stopped = || is_stop_requested(stop);
                populate_in_use(memory.regions(), populator.as_ref(), is_stopped);
            });
            thread.map(Some).map_err(failed("the thread of --prefault cannot be started"))
        }
    }
}

fn warn_unsupported() {
    static WARNED: Once = Once::new();
    WARNED.call_once(|| {
        log::warn!(
            "--prefault stage2: this host's KVM cannot populate stage 2 \
             (KVM_CAP_PRE_FAULT_MEMORY): only host memory is populated, and the guest takes a fault \
             for each page or block"
        );
    });
}

/// Populates memory that the guest uses, until `is_stopped` returns `true` or a call fails.
fn populate_in_use(
    regions: &[Arc<GuestRam>],
    populator: Option<&Stage2Populator>,
    is_stopped: impl Fn() -> bool,
) {
    for ram in regions {
        for chunk in chunks_of(ram) {
            if is_stopped() {
                return;
            }
            let host = ram.populate_in_use(chunk.start, chunk.size).map_err(io::Error::other);
            let result = host.and_then(|()| {
                let populated =
                    populator.map_or(Ok(()), |it| it.populate_chunk(chunk, &is_stopped));
                populated.map_err(io::Error::other)
            });
            if let Err(error) = result {
                let (from, error) = (chunk.start.0, error_text(&error));
                log::warn!("--prefault stage2: memory from {from:#x} on: {error}");
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use granule_types::{
        testing::skip,
        units::{Bytes, GuestAddress},
    };

    use super::*;
    use crate::memory::{BackingPlan, HostPages, RamOptions};

    #[test]
    fn memory_in_use_is_populated_chunk_by_chunk_until_the_stop() {
        let host = HostPages::of_this_host().unwrap();
        let plan = BackingPlan::new("anonymous".parse().unwrap(), &host).unwrap();
        let size = Bytes::mib(40);
        let start = GuestAddress(0x4000_0000);
        let ram = GuestRam::new(plan, &host, start, size, RamOptions::default()).unwrap();
        if ram.populate_in_use(start, ram.plan().page_size()).is_err() {
            skip("the kernel lacks MADV_POPULATE_WRITE");
            return;
        }
        let resident = || ram.resident_pages().unwrap().resident_bytes.values().sum::<u64>();
        let regions = [Arc::clone(&ram)];
        let chunks_left = Cell::new(2);

        populate_in_use(&regions, None, || chunks_left.replace(chunks_left.get() - 1) == 0);

        assert_eq!(resident(), Bytes::mib(32).0);
        populate_in_use(&regions, None, || false);
        assert_eq!(resident(), size.0);
    }
}
