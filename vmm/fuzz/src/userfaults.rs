// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Target of the messages of userfaultfd, one behind the other. What is filled for a fault is a part
//! of the region with the address, and nothing is filled for other addresses.

use granule_types::units::HostVirtAddr;
use granule_vmm::memory::{
    GuestMemory,
    on_demand::{part_at, region_of},
    user_faults::{MESSAGE_SIZE, fault_address},
};

use crate::guest;

/// Type of a message about a missing page, `UFFD_EVENT_PAGEFAULT`.
const EVENT_PAGEFAULT: u8 = 0x12;
const PAGE: u64 = 4096;
/// Bytes that are filled at once: a page, a multiple of it, and more than a region.
const UNITS: [u64; 3] = [0, 64 << 10, 1 << 20];

pub fn run(data: &[u8]) {
    let memory = guest::zeroed_memory();
    let (messages, _) = data.as_chunks::<MESSAGE_SIZE>();
    for message in messages {
        let address = fault_address(message);
        assert_eq!(address.is_some(), message[0] == EVENT_PAGEFAULT);
        let Some(HostVirtAddr(address)) = address else { continue };
        find_part(&memory, address);
        // Random addresses are seldom in a region or at its ends.
        for ram in memory.regions() {
            let near = address % (2 * ram.size().0);
            find_part(&memory, ram.host_address().0 - ram.size().0 / 2 + near);
        }
    }
}

fn find_part(memory: &GuestMemory, address: u64) {
    let is_inside = |address| {
        let mut regions = memory.regions().iter();
        regions.any(|ram| ram.host_range().contains(&HostVirtAddr(address)))
    };
    for unit in UNITS {
        let found = region_of(memory, HostVirtAddr(address));
        assert_eq!(found.is_some(), is_inside(address));
        let Some((_, ram, offset)) = found else { continue };
        let part = part_at(ram, unit, offset);
        assert!(part.contains(&(address - ram.host_address().0)));
        assert!(part.start.is_multiple_of(PAGE) && part.end.is_multiple_of(PAGE));
        assert!(part.end <= ram.size().0 && part.end - part.start <= unit.max(PAGE));
    }
}
