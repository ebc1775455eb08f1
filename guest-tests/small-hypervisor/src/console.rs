// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Output to the PL011 of QEMU's `virt` machine.

use core::{
    fmt::{self, Write as _},
    panic::PanicInfo,
};

use crate::cpu;

const DATA: *mut u8 = 0x0900_0000 as *mut u8;

struct Console;

impl fmt::Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            // SAFETY: the address is the data register of the device, and mapped as device memory.
            unsafe { DATA.write_volatile(byte) };
        }
        Ok(())
    }
}

/// Prints a line.
pub fn print(line: fmt::Arguments<'_>) {
    // The device accepts every byte.
    let _ = writeln!(Console, "{line}");
}

#[panic_handler]
fn panic(reason: &PanicInfo<'_>) -> ! {
    print(format_args!("failed: {reason}"));
    cpu::power_off()
}
