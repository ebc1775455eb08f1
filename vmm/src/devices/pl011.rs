// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! PL011 serial port (Arm DDI 0183G), for guest kernels without a 16550 driver; most arm64 machines
//! have it.
//!
//! Output is written at once: the port is never busy, and each byte raises the transmit interrupt.
//! A FIFO buffers input. Registers are 32 bits wide; drivers also access their low 16 or 8 bits.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    sync::Arc,
};

use granule_types::units::GuestAddress;
use vmm_sys_util::eventfd::EventFd;

use super::{
    MmioDevice, MmioDeviceInfo,
    serial::{SerialOutput, SerialPort},
};

const DATA: u64 = 0x00;
const RECEIVE_STATUS: u64 = 0x04;
const FLAGS: u64 = 0x18;
const LOW_POWER_COUNTER: u64 = 0x20;
const CONTROL: u64 = 0x30;
/// Offsets of registers that store a value without an effect: integer and fractional divisor, line
/// control, control, FIFO levels, DMA control.
const STORED: [u64; 6] = [0x24, 0x28, 0x2c, CONTROL, 0x34, 0x48];
const MASK: u64 = 0x38;
const RAW_STATUS: u64 = 0x3c;
const MASKED_STATUS: u64 = 0x40;
const CLEAR: u64 = 0x44;
/// Offset of the peripheral and cell identification registers, one byte per word.
const IDENTIFICATION: u64 = 0xfe0;
const IDENTITY: [u8; 8] = [0x11, 0x10, 0x14, 0x00, 0x0d, 0xf0, 0x05, 0xb1];

const RECEIVE_EMPTY: u32 = 1 << 4;
const TRANSMIT_EMPTY: u32 = 1 << 7;
const RECEIVED: u32 = 1 << 4;
const TRANSMITTED: u32 = 1 << 5;
const RECEIVE_TIMEOUT: u32 = 1 << 6;

/// Capacity of the receive FIFO in bytes.
const FIFO: usize = 32;

/// PL011 serial port.
#[allow(missing_debug_implementations, reason = "it holds any output")]
pub struct Pl011 {
    irq: EventFd,
    output: SerialOutput,
    drained: Arc<EventFd>,
    fifo: VecDeque<u8>,
    status: u32,
    mask: u32,
    /// Values of the registers in `STORED`, by offset.
    stored: BTreeMap<u64, u32>,
}

impl Pl011 {
    /// Creates a port that interrupts through `irq` and writes to `output`.
    pub fn new(irq: EventFd, output: SerialOutput) -> io::Result<Self> {
        let drained = Arc::new(EventFd::new(libc::EFD_NONBLOCK)?);
        let (fifo, stored) = (VecDeque::new(), BTreeMap::new());
        Ok(Self { irq, output, drained, fifo, status: 0, mask: 0, stored })
    }

    /// Describes the port for the device tree.
    pub fn describe(start: GuestAddress, irq: u32) -> MmioDeviceInfo {
        MmioDeviceInfo::new("serial", start, Some(irq), &["arm,pl011", "arm,primecell"])
    }

    /// Signals the interrupt if an unmasked cause is pending.
    fn update_interrupt(&self) {
        if self.status & self.mask != 0
            && let Err(error) = self.irq.write(1)
        {
            log::debug!("serial interrupt: {error}");
        }
    }

    fn read_data(&mut self) -> u32 {
        let byte = self.fifo.pop_front().unwrap_or(0);
        if self.fifo.is_empty() {
            self.status &= !(RECEIVED | RECEIVE_TIMEOUT);
            // Fails only if the counter is full; the event is then signalled already.
            let _ = self.drained.write(1);
        }
        byte.into()
    }

    fn write_data(&mut self, byte: u8) {
        if let Err(error) = self.output.write_all(&[byte]) {
            log::debug!("serial output: {error}");
        }
        self.status |= TRANSMITTED;
        self.update_interrupt();
    }

    fn load(&mut self, offset: u64) -> Option<u32> {
        Some(match offset {
            DATA => self.read_data(),
            FLAGS if self.fifo.is_empty() => TRANSMIT_EMPTY | RECEIVE_EMPTY,
            FLAGS => TRANSMIT_EMPTY,
            MASK => self.mask,
            RAW_STATUS => self.status,
            MASKED_STATUS => self.status & self.mask,
            IDENTIFICATION.. => {
                let index = usize::try_from((offset - IDENTIFICATION) / 4).ok()?;
                u32::from(*IDENTITY.get(index)?)
            }
            RECEIVE_STATUS | LOW_POWER_COUNTER => 0,
            _ if STORED.contains(&offset) => *self.stored.get(&offset).unwrap_or(&0),
            _ => return None,
        })
    }

    fn store(&mut self, offset: u64, value: u32) -> bool {
        match offset {
            DATA => self.write_data(value.to_le_bytes()[0]),
            MASK => {
                self.mask = value;
                self.update_interrupt();
            }
            CLEAR => self.status &= !value,
            RECEIVE_STATUS | LOW_POWER_COUNTER => {}
            _ if STORED.contains(&offset) => {
                self.stored.insert(offset, value);
            }
            _ => return false,
        }
        true
    }
}

impl SerialPort for Pl011 {
    fn receive(&mut self, input: &[u8]) -> usize {
        let space = (FIFO - self.fifo.len()).min(input.len());
        self.fifo.extend(&input[..space]);
        if !self.fifo.is_empty() {
            self.status |= RECEIVED | RECEIVE_TIMEOUT;
            self.update_interrupt();
        }
        space
    }

    fn drained(&self) -> Arc<EventFd> {
        Arc::clone(&self.drained)
    }
}

impl MmioDevice for Pl011 {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> bool {
        let value = match data.len() {
            1 | 2 | 4 if offset.is_multiple_of(4) => self.load(offset),
            _ => None,
        };
        if let Some(value) = value {
            data.copy_from_slice(&value.to_le_bytes()[..data.len()]);
        }
        value.is_some()
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> bool {
        let mut value = [0; 4];
        match data.len() {
            length @ (1 | 2 | 4) if offset.is_multiple_of(4) => {
                value[..length].copy_from_slice(data);
                self.store(offset, u32::from_le_bytes(value))
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    fn port() -> (Pl011, io::PipeReader, EventFd) {
        let (screen, output) = io::pipe().unwrap();
        let irq = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        (Pl011::new(irq.try_clone().unwrap(), Box::new(output)).unwrap(), screen, irq)
    }

    fn read_word(port: &mut Pl011, offset: u64) -> u32 {
        let mut data = [9; 4];
        assert!(port.read(offset, &mut data));
        u32::from_le_bytes(data)
    }

    #[test]
    fn transmitted_bytes_reach_the_output_and_raise_an_unmasked_interrupt() {
        let (mut port, mut screen, irq) = port();

        assert!(port.write(DATA, b"a"));
        assert!(irq.read().is_err());
        assert!(port.write(MASK, &TRANSMITTED.to_le_bytes()));

        assert_eq!(irq.read().unwrap(), 1);
        assert_eq!(read_word(&mut port, MASKED_STATUS), TRANSMITTED);
        assert!(port.write(CLEAR, &TRANSMITTED.to_le_bytes()));
        assert_eq!(read_word(&mut port, RAW_STATUS), 0);
        drop(port);
        let mut shown = String::new();
        screen.read_to_string(&mut shown).unwrap();
        assert_eq!(shown, "a");
    }

    #[test]
    fn the_fifo_bounds_and_keeps_input() {
        let (mut port, _, irq) = port();
        assert!(port.write(MASK, &RECEIVED.to_le_bytes()));

        assert_eq!(port.receive(&[7; 40]), FIFO);

        assert_eq!(irq.read().unwrap(), 1);
        assert_eq!(read_word(&mut port, FLAGS), TRANSMIT_EMPTY);
        let read: Vec<u32> = (0..FIFO).map(|_| read_word(&mut port, DATA)).collect();
        assert_eq!(read, [7; FIFO]);
        assert_eq!(read_word(&mut port, FLAGS), TRANSMIT_EMPTY | RECEIVE_EMPTY);
        assert_eq!(read_word(&mut port, RAW_STATUS), 0);
    }

    #[test]
    fn accesses_to_missing_registers_are_refused() {
        let (mut port, ..) = port();

        for offset in [0x08, 0x4c, 0x800, 0xffe] {
            assert!(!port.write(offset, &[1; 4]), "{offset:#x}");
        }
        assert!(!port.write(CONTROL, &[1; 8]));
        assert!(!port.read(CONTROL + 2, &mut [9; 2]));
    }
}
