// SPDX-License-Identifier: GPL-2.0-or-later
//! Access to memory and registers of the emulated machine.

use granule_stage2::PhysAddr;

/// The emulated machine, as the running CPU sees it.
pub trait Machine {
    /// Reads physical memory; returns whether all of it is memory.
    fn read(&self, phys: PhysAddr, bytes: &mut [u8]) -> bool;

    /// Translates a virtual address by the current translation regime of the running CPU.
    fn translate(&self, virt: u64) -> Option<PhysAddr>;

    /// Returns the value of `X0` to `X30` of the running CPU.
    fn register(&self, number: u8) -> u64;

    /// Returns SP_EL0 of the running CPU, which is at EL1 or EL2.
    fn thread_pointer(&self) -> u64;

    /// Returns the value of an identification register, by its name in lower case.
    fn identification(&self, name: &str) -> Option<u64>;

    /// Returns the exception level of the running CPU.
    fn exception_level(&self) -> u8;

    /// Reads eight bytes of physical memory.
    fn read_u64(&self, phys: PhysAddr) -> Option<u64> {
        let mut bytes = [0; 8];
        self.read(phys, &mut bytes).then(|| u64::from_le_bytes(bytes))
    }

    /// Reads eight bytes of virtual memory.
    fn read_virtual(&self, virt: u64) -> Option<u64> {
        self.translate(virt).and_then(|phys| self.read_u64(phys))
    }
}

/// A machine for tests: its memory is an array, and virtual addresses are [`LINEAR`] above it.
#[cfg(test)]
pub mod fake {
    use std::sync::{Arc, Mutex};

    use super::{Machine, PhysAddr};

    /// First address of the memory.
    pub const MEMORY: u64 = 0x4000_0000;
    /// Difference between virtual and physical addresses.
    pub const LINEAR: u64 = 0xffff_0000_0000_0000;

    /// State of the machine.
    #[derive(Debug)]
    pub struct FakeState {
        pub words: Vec<u64>,
        pub registers: [u64; 31],
        pub exception_level: u8,
        pub thread_pointer: u64,
    }

    /// A machine that a test and an observer share.
    #[derive(Debug, Clone)]
    pub struct FakeMachine(pub Arc<Mutex<FakeState>>);

    impl FakeMachine {
        /// Returns a machine with `pages` pages of 4K, all zero.
        pub fn new(pages: usize) -> Self {
            let words = vec![0; pages * 512];
            let (registers, exception_level, thread_pointer) = ([0; 31], 2, 0);
            let state = FakeState { words, registers, exception_level, thread_pointer };
            Self(Arc::new(Mutex::new(state)))
        }

        /// Writes eight bytes.
        pub fn write(&self, phys: u64, value: u64) {
            let index = usize::try_from((phys - MEMORY) / 8).unwrap();
            self.0.lock().unwrap().words[index] = value;
        }

        /// Sets a register.
        pub fn set_register(&self, number: usize, value: u64) {
            self.0.lock().unwrap().registers[number] = value;
        }
    }

    impl Machine for FakeMachine {
        fn read(&self, phys: PhysAddr, bytes: &mut [u8]) -> bool {
            let state = self.0.lock().unwrap();
            let memory = state.words.iter().flat_map(|word| word.to_le_bytes());
            let Some(first) = phys.0.checked_sub(MEMORY) else { return false };
            let mut memory = memory.skip(usize::try_from(first).unwrap());
            bytes.iter_mut().all(|byte| memory.next().map(|read| *byte = read).is_some())
        }

        fn translate(&self, virt: u64) -> Option<PhysAddr> {
            virt.checked_sub(LINEAR).map(PhysAddr)
        }

        fn register(&self, number: u8) -> u64 {
            self.0.lock().unwrap().registers[usize::from(number)]
        }

        /// Lines of 64 bytes.
        fn identification(&self, name: &str) -> Option<u64> {
            match name {
                "ctr_el0" => Some(0x8444_c004),
                "dczid_el0" => None,
                name => Some(name.len() as u64),
            }
        }

        fn thread_pointer(&self) -> u64 {
            self.0.lock().unwrap().thread_pointer
        }

        fn exception_level(&self) -> u8 {
            self.0.lock().unwrap().exception_level
        }
    }
}
