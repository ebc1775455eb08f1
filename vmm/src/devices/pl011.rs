// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The PL011 serial port, for guest kernels that have no driver for a 16550: it is what most arm64
//! machines have (Arm DDI 0183G).
//!
//! SerialOutput goes out at once, so the port is never busy and its transmit interrupt is raised by every
//! byte. Input waits in a FIFO. Its registers are words; drivers also use halves and bytes of them,
//! which read and write the same.

use std::{collections::VecDeque, fmt, sync::Arc};

use vmm_sys_util::eventfd::EventFd;

use super::{
    MmioDevice, MmioDeviceInfo,
    serial::{DrainNotifier, SerialOutput, SerialPort},
};

const DATA: u64 = 0x00;
const FLAGS: u64 = 0x18;
const INTEGER_DIVISOR: u64 = 0x24;
const FRACTIONAL_DIVISOR: u64 = 0x28;
const LINE_CONTROL: u64 = 0x2c;
const CONTROL: u64 = 0x30;
const FIFO_LEVELS: u64 = 0x34;
const MASK: u64 = 0x38;
const RAW_STATUS: u64 = 0x3c;
const MASKED_STATUS: u64 = 0x40;
const CLEAR: u64 = 0x44;
const DMA_CONTROL: u64 = 0x48;
/// Peripheral and cell identification, a byte a word.
const IDENTIFICATION: u64 = 0xfe0;
const IDENTITY: [u8; 8] = [0x11, 0x10, 0x14, 0x00, 0x0d, 0xf0, 0x05, 0xb1];

const RECEIVE_EMPTY: u32 = 1 << 4;
const TRANSMIT_EMPTY: u32 = 1 << 7;
const RECEIVED: u32 = 1 << 4;
const TRANSMITTED: u32 = 1 << 5;
const RECEIVE_TIMEOUT: u32 = 1 << 6;

/// Bytes of input that wait for the guest.
const FIFO: usize = 32;

/// The port.
pub struct Pl011 {
    irq: EventFd,
    output: SerialOutput,
    drained: Arc<DrainNotifier>,
    waiting: VecDeque<u8>,
    status: u32,
    mask: u32,
    /// Registers that only keep what was written.
    kept: [u32; 6],
    refused: u64,
    output_failed: bool,
}

impl fmt::Debug for Pl011 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pl011").finish_non_exhaustive()
    }
}

impl Pl011 {
    /// Bytes of registers.
    pub const SIZE: u64 = 0x1000;

    /// A port that interrupts by `irq` and writes to `output`.
    #[must_use]
    pub fn new(irq: EventFd, output: SerialOutput) -> Self {
        Self {
            irq,
            output,
            drained: Arc::default(),
            waiting: VecDeque::new(),
            status: 0,
            mask: 0,
            kept: [0; 6],
            refused: 0,
            output_failed: false,
        }
    }

    /// For the device tree.
    #[must_use]
    pub fn describe(start: u64, irq: u32) -> MmioDeviceInfo {
        MmioDeviceInfo {
            name: "serial".to_owned(),
            start,
            size: Self::SIZE,
            irq: Some(irq),
            compatible: &["arm,pl011", "arm,primecell"],
        }
    }

    /// Where a register that keeps what was written is kept.
    const fn kept(offset: u64) -> Option<usize> {
        match offset {
            INTEGER_DIVISOR => Some(0),
            FRACTIONAL_DIVISOR => Some(1),
            LINE_CONTROL => Some(2),
            CONTROL => Some(3),
            FIFO_LEVELS => Some(4),
            DMA_CONTROL => Some(5),
            _ => None,
        }
    }

    /// Interrupts if there is anything to be told.
    fn tell(&self) {
        if self.status & self.mask != 0
            && let Err(error) = self.irq.write(1)
        {
            log::debug!("serial interrupt: {error}");
        }
    }

    fn take(&mut self) -> u32 {
        let byte = self.waiting.pop_front().unwrap_or(0);
        if self.waiting.is_empty() {
            self.status &= !(RECEIVED | RECEIVE_TIMEOUT);
            self.drained.tell();
        }
        byte.into()
    }

    fn send(&mut self, byte: u8) {
        if let Err(error) = self.output.write_all(&[byte])
            && !self.output_failed
        {
            self.output_failed = true;
            log::warn!("the guest's console output is lost from here on: {error}");
        }
        self.status |= TRANSMITTED;
        self.tell();
    }

    fn load(&mut self, offset: u64) -> Option<u32> {
        Some(match offset {
            DATA => self.take(),
            FLAGS if self.waiting.is_empty() => TRANSMIT_EMPTY | RECEIVE_EMPTY,
            FLAGS => TRANSMIT_EMPTY,
            MASK => self.mask,
            RAW_STATUS => self.status,
            MASKED_STATUS => self.status & self.mask,
            IDENTIFICATION.. => {
                let index = usize::try_from((offset - IDENTIFICATION) / 4).ok()?;
                u32::from(*IDENTITY.get(index)?)
            }
            // Receive status and the low-power counter.
            0x04 | 0x20 => 0,
            _ => self.kept[Self::kept(offset)?],
        })
    }

    fn store(&mut self, offset: u64, value: u32) -> Option<()> {
        match offset {
            DATA => self.send(value.to_le_bytes()[0]),
            MASK => {
                self.mask = value;
                self.tell();
            }
            CLEAR => self.status &= !value,
            0x04 | 0x20 => {}
            _ => self.kept[Self::kept(offset)?] = value,
        }
        Some(())
    }
}

impl SerialPort for Pl011 {
    fn receive(&mut self, input: &[u8]) -> usize {
        let room = (FIFO - self.waiting.len()).min(input.len());
        self.waiting.extend(&input[..room]);
        if !self.waiting.is_empty() {
            self.status |= RECEIVED | RECEIVE_TIMEOUT;
            self.tell();
        }
        room
    }

    fn drained(&self) -> &Arc<DrainNotifier> {
        &self.drained
    }
}

impl MmioDevice for Pl011 {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let value = match data.len() {
            1 | 2 | 4 if offset.is_multiple_of(4) => self.load(offset),
            _ => None,
        };
        match value {
            Some(value) => data.copy_from_slice(&value.to_le_bytes()[..data.len()]),
            None => self.refused += 1,
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let mut value = [0; 4];
        let taken = match data.len() {
            length @ (1 | 2 | 4) if offset.is_multiple_of(4) => {
                value[..length].copy_from_slice(data);
                self.store(offset, u32::from_le_bytes(value))
            }
            _ => None,
        };
        if taken.is_none() {
            self.refused += 1;
        }
    }

    fn refused(&self) -> u64 {
        self.refused
    }
}

#[cfg(test)]
mod tests {
    use super::{super::testing::Page, *};

    fn port() -> (Pl011, Page, EventFd) {
        let (page, irq) = (Page::default(), EventFd::new(libc::EFD_NONBLOCK).unwrap());
        let port = Pl011::new(irq.try_clone().unwrap(), Box::new(page.clone()));
        (port, page, irq)
    }

    fn word(port: &mut Pl011, offset: u64) -> u32 {
        let mut data = [9; 4];
        port.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    #[test]
    fn what_the_guest_sends_comes_out_and_interrupts_where_that_is_wanted() {
        let (mut port, page, irq) = port();

        port.write(DATA, b"a");
        assert!(irq.read().is_err());
        port.write(MASK, &TRANSMITTED.to_le_bytes());

        assert_eq!(irq.read().unwrap(), 1);
        assert_eq!(word(&mut port, MASKED_STATUS), TRANSMITTED);
        port.write(CLEAR, &TRANSMITTED.to_le_bytes());
        assert_eq!(word(&mut port, RAW_STATUS), 0);
        assert_eq!(*page.0.lock(), b"a");
    }

    #[test]
    fn input_waits_for_the_guest_and_no_more_is_taken_than_there_is_room_for() {
        let (mut port, _, irq) = port();
        port.write(MASK, &RECEIVED.to_le_bytes());

        assert_eq!(port.receive(&[7; 40]), FIFO);

        assert_eq!(irq.read().unwrap(), 1);
        assert_eq!(word(&mut port, FLAGS), TRANSMIT_EMPTY);
        let read: Vec<u32> = (0..FIFO).map(|_| word(&mut port, DATA)).collect();
        assert_eq!(read, [7; FIFO]);
        assert_eq!(word(&mut port, FLAGS), TRANSMIT_EMPTY | RECEIVE_EMPTY);
        assert_eq!(word(&mut port, RAW_STATUS), 0);
    }

    #[test]
    fn it_says_what_it_is() {
        let (mut port, ..) = port();

        let identity: Vec<u32> = (0..8)
            .map(|n| word(&mut port, IDENTIFICATION + 4 * n))
            .collect();

        assert_eq!(identity, [0x11, 0x10, 0x14, 0, 0x0d, 0xf0, 0x05, 0xb1]);
        assert_eq!(port.refused(), 0);
    }

    #[test]
    fn registers_that_are_not_there_are_refused() {
        let (mut port, ..) = port();

        for offset in [0x08, 0x4c, 0x800, 0xffe] {
            port.write(offset, &[1; 4]);
        }
        port.write(CONTROL, &[1; 8]);
        let mut data = [9; 2];
        port.read(CONTROL + 2, &mut data);

        assert_eq!((port.refused(), data), (6, [0; 2]));
    }
}
