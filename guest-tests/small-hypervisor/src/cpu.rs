// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Instructions of EL2.

use core::arch::{asm, global_asm};

use granule_stage2::PhysAddr;

global_asm!(include_str!("boot.S"));

/// Executes an instruction without operands or with one register.
#[macro_export]
macro_rules! instruction {
    ($text:literal) => {
        // SAFETY: barriers and invalidations do not affect what the program sees in memory.
        unsafe { core::arch::asm!($text, options(nostack, preserves_flags)) }
    };
    ($text:literal, $operand:expr) => {{
        let operand: u64 = $operand;
        // SAFETY: as above. System registers of stage 2 and EL1 do not affect EL2.
        unsafe { core::arch::asm!($text, in(reg) operand, options(nostack, preserves_flags)) }
    }};
}

/// Reads a system register.
#[macro_export]
macro_rules! read_register {
    ($name:literal) => {{
        let value: u64;
        // SAFETY: the read has no side effect.
        unsafe {
            core::arch::asm!(concat!("mrs {}, ", $name), out(reg) value, options(nomem, nostack));
        }
        value
    }};
}

/// Returns the number of this CPU.
pub fn number() -> u64 {
    read_register!("mpidr_el1") & 0xff
}

/// Cleans and invalidates memory to the PoC. A `DSB` completes it.
pub fn clean_invalidate(phys: PhysAddr, size: u64) {
    let line = 4 << (read_register!("ctr_el0") >> 16 & 0xf);
    let mut at = phys.0 & !(line - 1);
    while at < phys.0 + size {
        instruction!("dc civac, {}", at);
        at += line;
    }
}

/// Calls the firmware (SMC Calling Convention), which is the emulator.
pub fn call_firmware(function: u64, arguments: [u64; 3]) -> i64 {
    let result;
    // SAFETY: the functions of PSCI that this program calls change no memory.
    unsafe {
        asm!(
            "smc #0",
            inlateout("x0") function => result,
            inlateout("x1") arguments[0] => _,
            inlateout("x2") arguments[1] => _,
            inlateout("x3") arguments[2] => _,
            options(nostack),
        );
    }
    result
}

/// Ends the machine.
pub fn power_off() -> ! {
    const SYSTEM_OFF: u64 = 0x8400_0008;
    call_firmware(SYSTEM_OFF, [0; 3]);
    sleep()
}

/// Turns this CPU off.
pub fn turn_off() -> ! {
    const CPU_OFF: u64 = 0x8400_0002;
    call_firmware(CPU_OFF, [0; 3]);
    sleep()
}

/// Starts the second CPU.
pub fn start_second() -> i64 {
    const CPU_ON: u64 = 0xc400_0003;
    unsafe extern "C" {
        fn start_second_cpu() -> !;
    }
    let entry = start_second_cpu as *const () as u64;
    call_firmware(CPU_ON, [1, entry, 0])
}

fn sleep() -> ! {
    loop {
        instruction!("wfe");
    }
}

/// Continues at EL1 with stage 2 of a table.
pub fn run_guest(root: PhysAddr, address: u64, argument: u64) -> ! {
    use crate::guest_table::{VMID, VTCR};
    unsafe extern "C" {
        fn enter_guest(address: u64, argument: u64) -> !;
    }
    instruction!("msr sctlr_el1, {}", 0x30d0_0800_u64);
    instruction!("msr cpacr_el1, {}", 3_u64 << 20);
    instruction!("msr vtcr_el2, {}", VTCR);
    instruction!("msr vttbr_el2, {}", u64::from(VMID) << 48 | root.0);
    instruction!("isb");
    // SAFETY: the guest reaches only memory that its table maps, and `enter_guest` keeps the stack.
    unsafe { enter_guest(address, argument) }
}
