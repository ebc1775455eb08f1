// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Operations while the vCPUs run: two words of each mailbox, the dirty bitmap, and reads of the
//! memory under test through the host's mapping.

use std::sync::atomic::Ordering;

use vm_memory::Bytes as _;

use super::{build::Parts, error::doing, machine::KvmMachine};
use crate::{
    guest::mailbox::{STOP_OFFSET, WRITES_OFFSET},
    machine::{MachineError, MigrationOps},
};
use granule_types::units::GuestAddress;

impl KvmMachine {
    /// Returns the addresses of a word in the mailbox page of each vCPU, in order.
    fn words(&self, offset: u64) -> impl Iterator<Item = GuestAddress> {
        let layout = &self.parts.layout;
        (0..self.vcpus).map(move |vcpu| GuestAddress(layout.mailbox(vcpu).0 + offset))
    }
}

impl MigrationOps for KvmMachine {
    fn set_stopping(&mut self, stop: bool) -> Result<(), MachineError> {
        let map = self.parts.memory.map();
        let writing = "writing the stop request to the mailboxes";
        if !stop {
            for word in self.words(WRITES_OFFSET) {
                map.store(0_u64, word, Ordering::Release)
                    .map_err(doing(writing))?;
            }
        }
        for word in self.words(STOP_OFFSET) {
            map.store(u64::from(stop), word, Ordering::Release)
                .map_err(doing(writing))?;
        }
        Ok(())
    }

    fn writes(&self) -> Result<Vec<u64>, MachineError> {
        let map = self.parts.memory.map();
        self.words(WRITES_OFFSET)
            .map(|word| map.load(word, Ordering::Acquire))
            .collect::<Result<_, _>>()
            .map_err(doing("reading the write counts from the mailboxes"))
    }

    fn collect_dirty_log(&mut self) -> Result<Vec<u64>, MachineError> {
        let Parts {
            vm, slot, dirty, ..
        } = &mut self.parts;
        dirty
            .collect(vm, slot)
            .map_err(doing("collecting the dirty bitmap"))
    }

    fn read(&self, address: GuestAddress, into: &mut [u8]) -> Result<(), MachineError> {
        let map = self.parts.memory.map();
        map.read_slice(into, address).map_err(|error| {
            MachineError::new(format!("reading guest memory at {:#x}", address.0), error)
        })
    }
}
