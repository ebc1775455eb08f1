// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Disks (virtio 1.2, section 5.2): a raw file or a block device of the host's.
//!
//! Requests are carried out one after the other in the device's thread, straight between the file
//! and guest memory. A write is acknowledged when the host's kernel has it; a flush, when the
//! host's storage has it (`fdatasync`), which is when the driver may rely on it. Drivers that do
//! not know flushes get every write flushed. A request that fails ends with an error status for
//! the driver and a warning here.

mod disk;
#[cfg(test)]
mod tests;

use std::io;

use virtio_bindings::{
    virtio_blk::{
        VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO,
        VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_WRITE_ZEROES, VIRTIO_BLK_ID_BYTES, VIRTIO_BLK_S_IOERR,
        VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH,
        VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
        VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
    },
    virtio_ids::VIRTIO_ID_BLOCK,
};

use super::{
    ConfigSpace, DescriptorChain, DeviceError, Direction, Queues, RateLimitedLog, VirtioDevice,
    bit,
    transfer::{self, Span},
};
use crate::memory::GuestMemory;

pub use disk::{Disk, DiskError};

/// Bytes in a sector, whatever the disk's own block is (section 5.2.4).
pub const SECTOR: u64 = 512;

/// Requests that fit into the queue.
const QUEUE: u16 = 256;
/// Buffers of data in one request.
const MOST_SEGMENTS: u32 = 254;
/// Sectors in one range to discard or to zero: 32 MiB, which even the slow way does not take long.
const MOST_SECTORS: u32 = 1 << 16;
/// Ranges in one request.
const MOST_RANGES: u32 = 32;
/// Bytes of a request's header, and of a range to discard or to zero.
const HEADER: usize = 16;

/// A disk's device.
#[derive(Debug)]
pub struct Block {
    disk: Disk,
    config: ConfigSpace,
    id: [u8; VIRTIO_BLK_ID_BYTES as usize],
    flush_each: bool,
    complaints: RateLimitedLog,
}

/// How a request ended, besides well.
enum Failed {
    /// The driver asks for what the disk does not do.
    Unsupported,
    /// The driver asks for what is not there.
    Invalid,
    /// The host's side failed.
    Host(io::Error),
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EOPNOTSUPP) => Self::Unsupported,
            _ => Self::Host(error),
        }
    }
}

impl Block {
    /// A device for a disk. The first 20 bytes of `id` are the disk's serial number.
    #[must_use]
    pub fn new(disk: Disk, id: &str) -> Self {
        let mut bytes = [0; VIRTIO_BLK_ID_BYTES as usize];
        for (place, byte) in bytes.iter_mut().zip(id.bytes()) {
            *place = byte;
        }
        Self {
            config: ConfigSpace::new(layout(disk.sectors()), 0..0),
            disk,
            id: bytes,
            flush_each: false,
            complaints: RateLimitedLog::default(),
        }
    }

    fn serve(&mut self, memory: &GuestMemory, chain: &DescriptorChain) -> Result<u32, DeviceError> {
        let mut header = [0; HEADER];
        let room = chain.length(Direction::Writable);
        if chain.copy_out(memory, 0, &mut header) < HEADER || room == 0 {
            return Err(DeviceError::Request(
                "it has no room for a disk request's header and status",
            ));
        }
        let [kind, _, low, high] = words(&header);
        let sector = u64::from(high) << 32 | u64::from(low);
        let data = room - 1;
        let result = match kind {
            VIRTIO_BLK_T_IN => self.read(memory, chain, sector, data),
            VIRTIO_BLK_T_OUT => self.write(memory, chain, sector),
            VIRTIO_BLK_T_FLUSH => self.disk.flush().map_err(Failed::from),
            VIRTIO_BLK_T_GET_ID => {
                let count = data.min(self.id.len());
                chain.copy_in(memory, 0, &self.id[..count]);
                Ok(())
            }
            VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => {
                self.clear(memory, chain, kind == VIRTIO_BLK_T_DISCARD)
            }
            _ => Err(Failed::Unsupported),
        };
        let filled = match (kind, &result) {
            (VIRTIO_BLK_T_IN, Ok(())) => data,
            (VIRTIO_BLK_T_GET_ID, Ok(())) => data.min(self.id.len()),
            _ => 0,
        };
        let status = match result {
            Ok(()) => VIRTIO_BLK_S_OK,
            Err(Failed::Unsupported) => VIRTIO_BLK_S_UNSUPP,
            Err(Failed::Invalid) => VIRTIO_BLK_S_IOERR,
            Err(Failed::Host(error)) => {
                self.complain(kind, sector, &error);
                VIRTIO_BLK_S_IOERR
            }
        };
        chain.copy_in(memory, data, &status.to_le_bytes()[..1]);
        // A chain is shorter than 4 GiB.
        Ok(u32::try_from(filled + 1).unwrap_or(u32::MAX))
    }

    fn read(
        &self,
        memory: &GuestMemory,
        chain: &DescriptorChain,
        sector: u64,
        length: usize,
    ) -> Result<(), Failed> {
        let offset = self.place(sector, length as u64)?;
        let span = Span { skip: 0, length };
        Ok(transfer::read_at(
            self.disk.file(),
            offset,
            memory,
            chain,
            span,
        )?)
    }

    fn write(
        &self,
        memory: &GuestMemory,
        chain: &DescriptorChain,
        sector: u64,
    ) -> Result<(), Failed> {
        self.check_writable()?;
        let length = chain.length(Direction::Readable) - HEADER;
        let offset = self.place(sector, length as u64)?;
        let span = Span {
            skip: HEADER,
            length,
        };
        transfer::write_at(self.disk.file(), offset, memory, chain, span)?;
        self.settle()
    }

    /// Discards ranges or fills them with zeros.
    fn clear(
        &self,
        memory: &GuestMemory,
        chain: &DescriptorChain,
        discard: bool,
    ) -> Result<(), Failed> {
        self.check_writable()?;
        let length = chain.length(Direction::Readable) - HEADER;
        if length == 0 || !length.is_multiple_of(HEADER) || length / HEADER > MOST_RANGES as usize {
            return Err(Failed::Invalid);
        }
        for at in (0..length).step_by(HEADER) {
            let mut range = [0; HEADER];
            chain.copy_out(memory, HEADER + at, &mut range);
            let [low, high, sectors, flags] = words(&range);
            let unmap = flags & VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0;
            if flags & !VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0 || (discard && unmap) {
                return Err(Failed::Unsupported);
            }
            if sectors > MOST_SECTORS {
                return Err(Failed::Invalid);
            }
            let length = u64::from(sectors) * SECTOR;
            let offset = self.place(u64::from(high) << 32 | u64::from(low), length)?;
            match discard {
                true => self.disk.discard(offset, length)?,
                false => self.disk.write_zeros(offset, length, unmap)?,
            }
        }
        self.settle()
    }

    fn settle(&self) -> Result<(), Failed> {
        match self.flush_each {
            true => Ok(self.disk.flush()?),
            false => Ok(()),
        }
    }

    fn check_writable(&self) -> Result<(), Failed> {
        match self.disk.is_read_only() {
            true => Err(Failed::Invalid),
            false => Ok(()),
        }
    }

    /// Where a range lies in the file, in bytes, if all of it lies on the disk.
    fn place(&self, sector: u64, length: u64) -> Result<u64, Failed> {
        let end = sector.checked_add(length / SECTOR);
        match end {
            Some(end) if length.is_multiple_of(SECTOR) && end <= self.disk.sectors() => {
                Ok(sector * SECTOR)
            }
            _ => Err(Failed::Invalid),
        }
    }

    fn complain(&mut self, kind: u32, sector: u64, error: &io::Error) {
        let path = self.disk.path().display();
        let doing = match kind {
            VIRTIO_BLK_T_IN => "read",
            VIRTIO_BLK_T_FLUSH => "flushed",
            _ => "written",
        };
        let advice = match error.kind() {
            io::ErrorKind::StorageFull => ": make room on the file system that holds it",
            io::ErrorKind::UnexpectedEof => ": the file has become shorter",
            _ => "",
        };
        self.complaints.warn(format_args!(
            "{path} could not be {doing} at sector {sector}, the guest gets an error: \
             {error}{advice}"
        ));
    }
}

impl VirtioDevice for Block {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn features(&self) -> u64 {
        let always = bit(VIRTIO_BLK_F_SEG_MAX) | bit(VIRTIO_BLK_F_BLK_SIZE);
        always
            | match self.disk.is_read_only() {
                true => bit(VIRTIO_BLK_F_RO),
                false => {
                    bit(VIRTIO_BLK_F_FLUSH)
                        | bit(VIRTIO_BLK_F_DISCARD)
                        | bit(VIRTIO_BLK_F_WRITE_ZEROES)
                }
            }
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE]
    }

    fn config(&self) -> &ConfigSpace {
        &self.config
    }

    fn activate(&mut self, features: u64, _: &mut Queues) -> Result<(), DeviceError> {
        self.flush_each = features & bit(VIRTIO_BLK_F_FLUSH) == 0 && !self.disk.is_read_only();
        Ok(())
    }

    fn process_queue(&mut self, queue: usize, queues: &mut Queues) -> Result<(), DeviceError> {
        let Some(ring) = queues.get(queue) else {
            return Ok(());
        };
        ring.drain(|memory, chain| self.serve(memory, chain))
    }
}

/// `struct virtio_blk_config` (section 5.2.4).
fn layout(sectors: u64) -> Vec<u8> {
    let mut config = vec![0; 60];
    let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &sectors.to_le_bytes());
    put(12, &MOST_SEGMENTS.to_le_bytes());
    put(20, &512_u32.to_le_bytes());
    put(36, &MOST_SECTORS.to_le_bytes());
    put(40, &MOST_RANGES.to_le_bytes());
    // Discarding less than a block of a file system gives nothing back.
    put(44, &8_u32.to_le_bytes());
    put(48, &MOST_SECTORS.to_le_bytes());
    put(52, &MOST_RANGES.to_le_bytes());
    put(56, &[1]);
    config
}

fn words(bytes: &[u8; HEADER]) -> [u32; 4] {
    let mut words = [0; 4];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(4)) {
        *word = bytes
            .iter()
            .rev()
            .fold(0, |word, byte| word << 8 | u32::from(*byte));
    }
    words
}
