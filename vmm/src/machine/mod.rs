// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The page-table test's machine on KVM.

mod config;

use std::convert::Infallible;

use granule_guest_tests::{
    events::EventCounts,
    guest_mode::GuestMode,
    machine::{Machine, MachineError, Region, Vcpu},
    results::{Host, Obtained},
    units::{GuestAddress, Nanoseconds},
};

pub use config::{DirtyMode, KvmConfig};

/// A virtual machine under KVM with one region of memory under test.
#[derive(Debug)]
pub struct KvmMachine {
    never: Infallible,
}

impl KvmMachine {
    /// Makes the machine: memory, VM, slots, vCPUs, guest program.
    ///
    /// # Errors
    /// What was asked for cannot be had on this host; the error says what and what to do.
    pub fn new(_config: KvmConfig) -> Result<Self, MachineError> {
        Err(MachineError::new(
            "making a KVM machine",
            "not yet for this architecture",
        ))
    }

    /// The guest mode in use.
    pub const fn mode(&self) -> GuestMode {
        match self.never {}
    }

    /// Width of the VM's guest-physical addresses, in bits.
    pub const fn ipa_bits(&self) -> u8 {
        match self.never {}
    }

    /// Where the region under test lies in this process.
    pub const fn host_address(&self) -> u64 {
        match self.never {}
    }
}

impl Machine for KvmMachine {
    fn host(&self) -> &Host {
        match self.never {}
    }

    fn engine(&self) -> &'static str {
        "kvm"
    }

    fn region(&self) -> Region {
        match self.never {}
    }

    fn take_vcpus(&mut self) -> Vec<Box<dyn Vcpu>> {
        match self.never {}
    }

    fn obtained(&self) -> Result<Obtained, MachineError> {
        match self.never {}
    }

    fn set_dirty_logging(&mut self, _on: bool) -> Result<Nanoseconds, MachineError> {
        match self.never {}
    }

    fn dirty_log(&mut self) -> Result<Vec<u64>, MachineError> {
        match self.never {}
    }

    fn drop_backing(&mut self) -> Result<Nanoseconds, MachineError> {
        match self.never {}
    }

    fn restore_backing(&mut self) -> Result<(), MachineError> {
        match self.never {}
    }

    fn read_u64(&self, _address: GuestAddress) -> Result<u64, MachineError> {
        match self.never {}
    }

    fn events(&mut self) -> Result<EventCounts, MachineError> {
        match self.never {}
    }
}
