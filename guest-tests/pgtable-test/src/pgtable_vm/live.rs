// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is done to the machine while its vCPUs run: two words of each mailbox, the dirty log, and
//! the memory under test read through the host's mapping.

use std::sync::atomic::Ordering;

use crate::guest::mailbox::{STOP_OFFSET, WRITES_OFFSET};
use crate::machine::{Live, MachineError};
use granule_types::units::GuestAddress;
use vm_memory::Bytes as _;

use super::{KvmMachine, Parts, doing};

impl KvmMachine {
    /// A word of every vCPU's mailbox page, by vCPU.
    fn words(&self, offset: u64) -> impl Iterator<Item = GuestAddress> {
        let layout = &self.parts.layout;
        (0..self.vcpus).map(move |vcpu| GuestAddress(layout.mailbox(vcpu).0 + offset))
    }
}

impl Live for KvmMachine {
    fn set_stopping(&mut self, stop: bool) -> Result<(), MachineError> {
        let map = self.parts.memory.map();
        let telling = "telling vCPUs in their mailboxes whether to stop";
        if !stop {
            for word in self.words(WRITES_OFFSET) {
                map.store(0_u64, word, Ordering::Release)
                    .map_err(doing(telling))?;
            }
        }
        for word in self.words(STOP_OFFSET) {
            map.store(u64::from(stop), word, Ordering::Release)
                .map_err(doing(telling))?;
        }
        Ok(())
    }

    fn writes(&self) -> Result<Vec<u64>, MachineError> {
        let map = self.parts.memory.map();
        self.words(WRITES_OFFSET)
            .map(|word| map.load(word, Ordering::Acquire))
            .collect::<Result<_, _>>()
            .map_err(doing("reading how often vCPUs wrote"))
    }

    fn collect_dirty_log(&mut self) -> Result<Vec<u64>, MachineError> {
        let Parts {
            vm, slot, dirty, ..
        } = &mut self.parts;
        dirty
            .collect(vm, slot)
            .map_err(doing("collecting the dirty log"))
    }

    fn read(&self, address: GuestAddress, into: &mut [u8]) -> Result<(), MachineError> {
        let map = self.parts.memory.map();
        map.read_slice(into, address).map_err(|error| {
            MachineError::new(format!("reading guest memory at {:#x}", address.0), error)
        })
    }
}
