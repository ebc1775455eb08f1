// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Block device (virtio 1.2, section 5.2), backed by a raw image or a block device of the host.
//!
//! The worker processes requests one at a time and transfers data directly between the file and
//! guest memory. A write completes when the host's kernel has accepted its data, and a flush when
//! all completed writes are on the host's storage (`fdatasync`). For a driver without the flush
//! feature, each write is flushed. A failed request returns an error status to the driver and logs
//! a warning.

mod disk;
#[cfg(test)]
mod tests;

use std::io;

use virtio_bindings::{virtio_blk::*, virtio_ids::VIRTIO_ID_BLOCK};

use super::{
    ConfigSpace, DescriptorChain, DeviceError, DeviceProperties, Direction, Queue, Queues,
    RateLimitedLog, VirtioDevice, feature_bit, feature_bits,
};

pub use disk::Disk;

/// Bytes per sector, independent of the block size of the disk (section 5.2.4).
pub const SECTOR_SIZE: u64 = 512;

const QUEUE_SIZE: u16 = 256;
/// Maximum number of data buffers per request.
const MAX_SEGMENTS: u32 = 254;
/// Maximum sectors in a range to discard or zero: 32 MiB, fast even without `fallocate`.
const MAX_DISCARD_SECTORS: u32 = 1 << 16;
/// Maximum ranges per request.
const MAX_DISCARD_RANGES: u32 = 32;
/// Size of a request header, and of a discard or write-zeroes segment, in bytes.
const HEADER_SIZE: usize = 16;

/// Block device.
#[derive(Debug)]
pub struct Block {
    disk: Disk,
    device_id: [u8; VIRTIO_BLK_ID_BYTES as usize],
    flushes_each_write: bool,
    log: RateLimitedLog,
}

/// Reason for an error status.
enum RequestError {
    /// Request that the disk does not support.
    Unsupported,
    /// Request that exceeds the disk or its limits.
    Invalid,
    /// Error of a call on the host.
    Io(io::Error),
}

impl From<io::Error> for RequestError {
    fn from(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EOPNOTSUPP) => Self::Unsupported,
            _ => Self::Io(error),
        }
    }
}

impl Block {
    /// Creates a device for a disk. The first 20 bytes of `id` are its serial number.
    pub fn new(disk: Disk, id: &str) -> Self {
        let mut bytes = [0; VIRTIO_BLK_ID_BYTES as usize];
        let length = id.len().min(bytes.len());
        bytes[..length].copy_from_slice(&id.as_bytes()[..length]);
        Self { disk, device_id: bytes, flushes_each_write: false, log: RateLimitedLog::default() }
    }

    /// Processes a request and returns the number of bytes written to its buffers.
    fn process_request(&mut self, chain: &DescriptorChain) -> Result<usize, DeviceError> {
        let mut header = [0; HEADER_SIZE];
        let space = chain.length(Direction::Writable);
        if chain.read(0, &mut header) < HEADER_SIZE || space == 0 {
            return Err(DeviceError::Request(
                "it has no space for the header and status of a block request",
            ));
        }
        let [request_type, _, low, high] = le_words(&header);
        let sector = u64::from(high) << 32 | u64::from(low);
        let data = space - 1;
        let result = match request_type {
            VIRTIO_BLK_T_IN => self.read(chain, sector, data),
            VIRTIO_BLK_T_OUT => self.write(chain, sector),
            VIRTIO_BLK_T_FLUSH => {
                self.disk.flush_for_guest().map(|()| 0).map_err(RequestError::from)
            }
            VIRTIO_BLK_T_GET_ID => {
                let count = data.min(self.device_id.len());
                Ok(chain.write(0, &self.device_id[..count]))
            }
            VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => {
                self.clear_ranges(chain, request_type == VIRTIO_BLK_T_DISCARD)
            }
            _ => Err(RequestError::Unsupported),
        };
        let (written, status) = match result {
            Ok(written) => (written, VIRTIO_BLK_S_OK),
            Err(RequestError::Unsupported) => (0, VIRTIO_BLK_S_UNSUPP),
            Err(RequestError::Invalid) => (0, VIRTIO_BLK_S_IOERR),
            Err(RequestError::Io(error)) => {
                self.log_failure(request_type, sector, &error);
                (0, VIRTIO_BLK_S_IOERR)
            }
        };
        chain.write(data, &status.to_le_bytes()[..1]);
        Ok(written + 1)
    }

    fn read(
        &self,
        chain: &DescriptorChain,
        sector: u64,
        length: usize,
    ) -> Result<usize, RequestError> {
        let offset = self.byte_offset(sector, length as u64)?;
        chain.transfer(&self.disk.file, offset, Direction::Writable, 0..length)?;
        Ok(length)
    }

    fn write(&mut self, chain: &DescriptorChain, sector: u64) -> Result<usize, RequestError> {
        self.check_writable()?;
        let length = chain.length(Direction::Readable);
        let offset = self.byte_offset(sector, (length - HEADER_SIZE) as u64)?;
        chain.transfer(&self.disk.file, offset, Direction::Readable, HEADER_SIZE..length)?;
        self.complete_write()
    }

    fn clear_ranges(
        &mut self,
        chain: &DescriptorChain,
        discard: bool,
    ) -> Result<usize, RequestError> {
        self.check_writable()?;
        let length = chain.length(Direction::Readable) - HEADER_SIZE;
        let ranges = length / HEADER_SIZE;
        if !length.is_multiple_of(HEADER_SIZE)
            || !(1..=MAX_DISCARD_RANGES as usize).contains(&ranges)
        {
            return Err(RequestError::Invalid);
        }
        for at in (0..length).step_by(HEADER_SIZE) {
            let mut range = [0; HEADER_SIZE];
            chain.read(HEADER_SIZE + at, &mut range);
            let [low, high, sectors, flags] = le_words(&range);
            let unmap = flags & VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0;
            if flags & !VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0 || (discard && unmap) {
                return Err(RequestError::Unsupported);
            }
            if sectors > MAX_DISCARD_SECTORS {
                return Err(RequestError::Invalid);
            }
            let length = u64::from(sectors) * SECTOR_SIZE;
            let offset = self.byte_offset(u64::from(high) << 32 | u64::from(low), length)?;
            match discard {
                _ if length == 0 => {}
                true => self.disk.discard(offset, length)?,
                false => self.disk.write_zeros(offset, length, unmap)?,
            }
        }
        self.complete_write()
    }

    /// Flushes the write if the driver cannot send flush requests.
    fn complete_write(&mut self) -> Result<usize, RequestError> {
        if self.flushes_each_write {
            self.disk.flush_for_guest()?;
        }
        Ok(0)
    }

    fn check_writable(&self) -> Result<(), RequestError> {
        match self.disk.is_read_only {
            true => Err(RequestError::Invalid),
            false => Ok(()),
        }
    }

    /// Returns the file offset of a range, or an error if the range exceeds the disk.
    fn byte_offset(&self, sector: u64, length: u64) -> Result<u64, RequestError> {
        let end = sector.checked_add(length / SECTOR_SIZE);
        match end {
            Some(end) if length.is_multiple_of(SECTOR_SIZE) && end <= self.disk.sectors => {
                Ok(sector * SECTOR_SIZE)
            }
            _ => Err(RequestError::Invalid),
        }
    }

    fn log_failure(&mut self, request_type: u32, sector: u64, error: &io::Error) {
        let path = self.disk.path.display();
        let action = match request_type {
            VIRTIO_BLK_T_IN => "read",
            VIRTIO_BLK_T_FLUSH => "flushed",
            _ => "written",
        };
        let advice = match error.kind() {
            io::ErrorKind::StorageFull => ": make room on the file system that holds it",
            io::ErrorKind::UnexpectedEof => ": the file has become shorter",
            _ => "",
        };
        self.log.warn(format_args!(
            "{path} cannot be {action} at sector {sector}; the request fails: {error}{advice}"
        ));
    }
}

impl VirtioDevice for Block {
    fn properties(&self) -> DeviceProperties {
        let access: &[u32] = match self.disk.is_read_only {
            true => &[VIRTIO_BLK_F_RO],
            false => &[VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES],
        };
        DeviceProperties {
            device_type: VIRTIO_ID_BLOCK,
            features: feature_bits(access)
                | feature_bits(&[VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_BLK_SIZE]),
            queue_sizes: &[QUEUE_SIZE],
            config: ConfigSpace::new(config_bytes(self.disk.sectors), 0..0),
        }
    }

    fn activate(&mut self, features: u64, _: &mut Queues) -> Result<(), DeviceError> {
        let flush = features & feature_bit(VIRTIO_BLK_F_FLUSH) != 0;
        self.flushes_each_write = !flush && !self.disk.is_read_only;
        Ok(())
    }

    fn process_queue(&mut self, _: usize, queue: &mut Queue) -> Result<(), DeviceError> {
        queue.serve_available(|chain| self.process_request(chain))
    }
}

/// Returns the contents of `struct virtio_blk_config` (section 5.2.4).
fn config_bytes(sectors: u64) -> Vec<u8> {
    let mut config = vec![0; 60];
    let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &sectors.to_le_bytes());
    put(12, &MAX_SEGMENTS.to_le_bytes());
    put(20, &512_u32.to_le_bytes());
    put(36, &MAX_DISCARD_SECTORS.to_le_bytes());
    put(40, &MAX_DISCARD_RANGES.to_le_bytes());
    // Discard alignment of 8 sectors: a discard of less than a file system block frees nothing.
    put(44, &8_u32.to_le_bytes());
    put(48, &MAX_DISCARD_SECTORS.to_le_bytes());
    put(52, &MAX_DISCARD_RANGES.to_le_bytes());
    put(56, &[1]);
    config
}

fn le_words(bytes: &[u8; HEADER_SIZE]) -> [u32; 4] {
    let (words, _) = bytes.as_chunks::<4>();
    [0, 1, 2, 3].map(|index| u32::from_le_bytes(words[index]))
}
