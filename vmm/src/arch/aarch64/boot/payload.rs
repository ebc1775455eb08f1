// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Compressed payload of a kernel file, which is decompressed as a stream. A decoder has the window of
//! its format: 32K for gzip; that of zstd may be as large as the image, which is then decoded twice, as
//! the first decoder reads the header.

use std::io::{self, BufReader, Read, Seek, SeekFrom};

use granule_types::units::Bytes;

use super::BootError;

/// Bytes that are decompressed at a time.
const CHUNK_SIZE: usize = 64 << 10;

/// Compression format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// RFC 1952.
    Gzip,
    /// RFC 8878.
    Zstd,
}

impl Compression {
    const fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
        }
    }

    pub(super) const fn failed(self) -> impl FnOnce(io::Error) -> BootError {
        move |source| BootError::Decompress { compression: self.name(), source }
    }
}

/// Place of a payload in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Payload {
    /// Format.
    pub compression: Compression,
    /// First byte.
    pub offset: u64,
    /// Compressed bytes.
    pub size: u64,
}

impl Payload {
    /// Returns a reader of the uncompressed bytes.
    ///
    /// # Errors
    /// The file cannot be read, or the payload has another format.
    pub fn decompress<'a>(
        &self,
        mut file: impl Read + Seek + 'a,
    ) -> Result<Box<dyn Read + 'a>, BootError> {
        file.seek(SeekFrom::Start(self.offset)).map_err(BootError::Read)?;
        let compressed = BufReader::new(file.take(self.size));
        Ok(match self.compression {
            Compression::Gzip => Box::new(flate2::bufread::GzDecoder::new(compressed)),
            Compression::Zstd => {
                let decoder = ruzstd::decoding::StreamingDecoder::new(compressed);
                let failed = |error| io::Error::other(format!("{error}"));
                Box::new(decoder.map_err(failed).map_err(self.compression.failed())?)
            }
        })
    }

    /// Decompresses the image, whose header says that it has `size`, and calls `write` with offsets
    /// and bytes.
    ///
    /// # Errors
    /// The file cannot be read or decompressed, or the image is larger; or an error of `write`.
    pub fn write(
        &self,
        file: impl Read + Seek,
        size: Bytes,
        mut write: impl FnMut(u64, &[u8]) -> Result<(), BootError>,
    ) -> Result<(), BootError> {
        let mut image = self.decompress(file)?;
        let mut buffer = vec![0; CHUNK_SIZE];
        let mut offset = 0;
        loop {
            let bytes = match image.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(count) => &buffer[..count],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(self.compression.failed()(error)),
            };
            if offset + bytes.len() as u64 > size.0 {
                return Err(BootError::InvalidInput(format!(
                    "the uncompressed kernel is larger than the {size} of its header: remove what \
                     was appended to it"
                )));
            }
            write(offset, bytes)?;
            offset += bytes.len() as u64;
        }
    }
}
