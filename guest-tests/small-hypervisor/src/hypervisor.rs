// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The hypervisor: both CPUs run a vCPU of the guest, and handle its aborts and calls.

use granule_stage2::{Ipa, PhysAddr};

use crate::{
    console::print,
    cpu,
    guest::{self, CODE, Call, DATA, MEETING},
    guest_table::{BLOCK, GuestTable, Memory, PAGE},
    lock::SpinLock,
    read_register,
};

unsafe extern "Rust" {
    safe fn create_guest_table() -> &'static mut dyn GuestTable;
}

/// A guest.
struct Vm {
    table: &'static mut dyn GuestTable,
    /// Memory of the block that moves.
    block: PhysAddr,
    aborts: u64,
    /// vCPUs that have ended, and the last round of the guest.
    ended: u64,
    round: u64,
}

static VM: SpinLock<Option<Vm>> = SpinLock::new(None);

fn with_vm<R>(use_vm: impl FnOnce(&mut Vm) -> R) -> R {
    VM.with(|vm| use_vm(vm.as_mut().expect("the first CPU has created the VM")))
}

impl Vm {
    /// Returns the memory at an address.
    fn memory(&self, ipa: Ipa) -> Memory {
        let memory = [CODE, Memory { phys: self.block, ..DATA }, MEETING];
        let contains =
            |memory: &Memory| (memory.ipa.0..memory.ipa.0 + memory.size).contains(&ipa.0);
        match memory.into_iter().find(contains) {
            Some(memory) => memory,
            None => panic!("the guest has no memory at {:#x}", ipa.0),
        }
    }

    /// Maps the memory of an abort, or makes its page writable.
    fn handle_abort(&mut self, ipa: Ipa, writes: bool) {
        self.aborts += 1;
        let memory = self.memory(ipa);
        let page = Ipa(ipa.0 & !(PAGE - 1));
        match self.table.permits(ipa, writes) {
            // Also if the other CPU has made it writable: this one may hold the entry without.
            Some(_) if writes => self.table.make_page_writable(page, memory),
            // The other CPU has handled it.
            Some(_) => {}
            None => self.table.map(self.mappable(page, memory)),
        }
    }

    /// Returns the whole of the memory, or a page of it if other pages are mapped.
    fn mappable(&self, page: Ipa, memory: Memory) -> Memory {
        let mut pages = (memory.ipa.0..memory.ipa.0 + memory.size).step_by(PAGE as usize);
        if pages.any(|page| self.table.permits(Ipa(page), false).is_some()) {
            let phys = memory.phys + (page.0 - memory.ipa.0);
            return Memory { ipa: page, phys, size: PAGE, ..memory };
        }
        memory
    }

    /// Executes a call of the guest.
    fn call(&mut self, call: Call, ipa: Ipa, size: u64) {
        let memory = self.memory(ipa);
        let range = Memory { ipa, phys: memory.phys + (ipa.0 - memory.ipa.0), size, ..memory };
        match call {
            Call::WriteProtect => self.table.write_protect(ipa, size),
            Call::Unmap => self.table.unmap(range),
            Call::RecoverBlock => self.table.recover_block(range),
            Call::Move => {
                self.table.unmap(range);
                guest::copy_block(self.block, guest::MOVED_TO);
                self.block = guest::MOVED_TO;
            }
            Call::End => unreachable!("a vCPU ends outside"),
        }
    }

    /// Prints the result, when the guest has ended.
    fn finish(&mut self) {
        self.table.unmap(Memory { phys: self.block, ..DATA });
        let wrong = guest::count_wrong_pages(self.block, self.round);
        print(format_args!("{} aborts, {} rounds, {wrong} wrong pages", self.aborts, self.round));
    }
}

/// Runs a vCPU on each CPU.
// SAFETY: no other function has this name.
#[unsafe(no_mangle)]
extern "C" fn run_cpu(number: u64) -> ! {
    if number == 0 {
        guest::load();
        let table = create_guest_table();
        let vm = Vm { table, block: DATA.phys, aborts: 0, ended: 0, round: 0 };
        VM.with(|empty| *empty = Some(vm));
        assert_eq!(cpu::start_second(), 0, "the second CPU starts");
    }
    let root = with_vm(|vm| vm.table.root());
    cpu::run_guest(root, CODE.ipa.0, number)
}

/// Handles an exception of the guest, whose registers X0 to X30 are saved.
// SAFETY: no other function has this name.
#[unsafe(no_mangle)]
extern "C" fn handle_exit(registers: &mut [u64; 31]) {
    let syndrome = read_register!("esr_el2");
    if syndrome >> 26 == HVC && Call::new(registers[0]) == Some(Call::End) {
        end(registers[22]);
    }
    small_hypervisor_handle(registers, syndrome);
}

const HVC: u64 = 0x16;

/// Handles an abort or a call. When it returns, no CPU uses what it has removed.
// SAFETY: no other function has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn small_hypervisor_handle(registers: &[u64; 31], syndrome: u64) {
    const INSTRUCTION_ABORT: u64 = 0x20;
    const DATA_ABORT: u64 = 0x24;
    match syndrome >> 26 {
        HVC => {
            let [number, ipa, size, ..] = *registers;
            match Call::new(number) {
                Some(call) => with_vm(|vm| vm.call(call, Ipa(ipa), size)),
                None => panic!("call {number} of the guest: its memory has another value"),
            }
        }
        // Without stage 1, virtual and intermediate physical addresses are equal.
        class @ (INSTRUCTION_ABORT | DATA_ABORT) => {
            let writes = class == DATA_ABORT && syndrome >> 6 & 1 != 0;
            let ipa = Ipa(read_register!("far_el2"));
            with_vm(|vm| vm.handle_abort(ipa, writes));
        }
        _ => panic!("unexpected exception of the guest: {syndrome:#x}"),
    }
}

/// Ends the vCPU of this CPU; the last one ends the machine.
fn end(round: u64) -> ! {
    let is_last = with_vm(|vm| {
        vm.ended += 1;
        vm.round = round - 1;
        vm.ended == 2
    });
    if !is_last {
        cpu::turn_off();
    }
    with_vm(Vm::finish);
    cpu::power_off()
}

/// Reports an exception of EL2.
// SAFETY: no other function has this name.
#[unsafe(no_mangle)]
extern "C" fn stop_at_unexpected_exception(syndrome: u64, address: u64, accessed: u64) -> ! {
    let cpu = cpu::number();
    panic!("exception of CPU {cpu}: {syndrome:#x} at {address:#x}, address {accessed:#x}")
}

const _: () = assert!(BLOCK == DATA.size);
