// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Kernel images: the arm64 `Image`, the same packed with gzip, and the EFI "zboot" image that
//! distributions install as `vmlinuz`, whose payload is packed with gzip or zstd.
//!
//! An `Image` starts with a header of 64 bytes (`Documentation/arch/arm64/booting.rst`, 4):
//! `text_offset` at 8, `image_size` at 16, flags at 24, `ARM\x64` at 56. A zboot image
//! (`drivers/firmware/efi/libstub/zboot-header.S`) has `MZ` at 0, `zimg` at 4, the payload's offset
//! and size at 8 and 12 and the name of its packing at 24. All numbers are little-endian.
//!
//! A file is taken apart without trust: lengths are checked, and unpacking ends at
//! [`LARGEST`] bytes.

use std::io::{self, Read};

use granule_types::units::Bytes;
use thiserror::Error;

/// The largest kernel, unpacked. Debian's is 40M; one with every driver built in stays below 300M.
pub const LARGEST: Bytes = Bytes::mib(512);

const MAGIC_AT: usize = 56;
const MAGIC: &[u8] = b"ARM\x64";
const GZIP: &[u8] = &[0x1f, 0x8b];
/// Where a kernel before Linux 3.17 wants to lie; its header does not tell its size.
const OLD_TEXT_OFFSET: u64 = 0x8_0000;

/// Why a file cannot be booted.
#[derive(Debug, Error)]
pub enum ImageError {
    /// It is no kernel image.
    #[error(
        "it is no arm64 kernel image (Image, Image.gz, or an EFI zboot vmlinuz): it begins with \
         {0:02x?}"
    )]
    Unknown(Vec<u8>),
    /// It ends too early.
    #[error("it ends before its {0}: was it copied whole?")]
    Short(&'static str),
    /// It cannot be unpacked.
    #[error("its {packing} data cannot be unpacked")]
    Unpack {
        /// How it is packed.
        packing: &'static str,
        /// What is wrong with it.
        #[source]
        source: io::Error,
    },
    /// It is packed in a way that is not known.
    #[error(
        "its payload is packed with '{0}'; gzip and zstd are known (CONFIG_KERNEL_GZIP, _ZSTD)"
    )]
    Packing(String),
    /// It is larger than any kernel.
    #[error("unpacked it is larger than {0}")]
    Large(Bytes),
    /// It runs big-endian.
    #[error("it is a big-endian kernel (CONFIG_CPU_BIG_ENDIAN), which this machine does not start")]
    BigEndian,
}

/// A kernel, ready to be copied into a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// What is copied.
    pub bytes: Vec<u8>,
    /// From a 2M boundary to where it is copied.
    pub text_offset: Bytes,
    /// How much memory it takes there, what it clears at start included.
    pub size: Bytes,
}

impl Image {
    /// Takes a file apart.
    ///
    /// # Errors
    /// It is no kernel, damaged, or none that can be started.
    pub fn from_file(file: Vec<u8>) -> Result<Self, ImageError> {
        Self::within(file, LARGEST)
    }

    /// As [`Image::from_file`], where a kernel is no larger than `most`.
    ///
    /// # Errors
    /// As [`Image::from_file`].
    pub fn within(file: Vec<u8>, most: Bytes) -> Result<Self, ImageError> {
        if let Some(payload) = zboot(&file, most)? {
            return Self::unpacked(payload, most);
        }
        if file.starts_with(GZIP) {
            return Self::unpacked(gunzip(&file, most)?, most);
        }
        Self::unpacked(file, most)
    }

    fn unpacked(bytes: Vec<u8>, most: Bytes) -> Result<Self, ImageError> {
        if bytes.get(MAGIC_AT..MAGIC_AT + MAGIC.len()) != Some(MAGIC) {
            return Err(ImageError::Unknown(bytes[..bytes.len().min(4)].to_vec()));
        }
        let short = ImageError::Short("header");
        let [text_offset, image_size, flags] = match [8, 16, 24].map(|at| number(&bytes, at)) {
            [Some(text_offset), Some(image_size), Some(flags)] => [text_offset, image_size, flags],
            _ => return Err(short),
        };
        if flags & 1 != 0 {
            return Err(ImageError::BigEndian);
        }
        let length = bytes.len() as u64;
        let (text_offset, size) = match image_size {
            0 => (OLD_TEXT_OFFSET, length),
            size => (text_offset, size.max(length)),
        };
        if length > most.0 || size > most.0 || text_offset > most.0 {
            return Err(ImageError::Large(most));
        }
        Ok(Self {
            bytes,
            text_offset: Bytes(text_offset),
            size: Bytes(size),
        })
    }
}

/// The unpacked payload of a zboot image; `None` if it is none.
fn zboot(file: &[u8], most: Bytes) -> Result<Option<Vec<u8>>, ImageError> {
    if !file.starts_with(b"MZ") || file.get(4..8) != Some(b"zimg") {
        return Ok(None);
    }
    let short = || ImageError::Short("payload");
    let word = |at: usize| -> Option<usize> {
        let bytes: [u8; 4] = file.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_le_bytes(bytes)).ok()
    };
    let (offset, size) = word(8).zip(word(12)).ok_or_else(short)?;
    let end = offset.checked_add(size).ok_or_else(short)?;
    let payload = file.get(offset..end).ok_or_else(short)?;
    let name = file.get(24..MAGIC_AT).ok_or_else(short)?;
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    match name {
        b"gzip" => gunzip(payload, most),
        b"zstd" | b"zstd22" => unzstd(payload, most),
        other => Err(ImageError::Packing(
            String::from_utf8_lossy(other).into_owned(),
        )),
    }
    .map(Some)
}

fn gunzip(packed: &[u8], most: Bytes) -> Result<Vec<u8>, ImageError> {
    read_all("gzip", flate2::read::GzDecoder::new(packed), most)
}

fn unzstd(packed: &[u8], most: Bytes) -> Result<Vec<u8>, ImageError> {
    let unpack = |source: io::Error| ImageError::Unpack {
        packing: "zstd",
        source,
    };
    let decoder = ruzstd::decoding::StreamingDecoder::new(packed)
        .map_err(|error| unpack(io::Error::other(error.to_string())))?;
    read_all("zstd", decoder, most)
}

fn read_all(packing: &'static str, from: impl Read, most: Bytes) -> Result<Vec<u8>, ImageError> {
    let mut unpacked = Vec::new();
    from.take(most.0 + 1)
        .read_to_end(&mut unpacked)
        .map_err(|source| ImageError::Unpack { packing, source })?;
    if unpacked.len() as u64 > most.0 {
        return Err(ImageError::Large(most));
    }
    Ok(unpacked)
}

fn number(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::{Compression, write::GzEncoder};
    use proptest::prelude::*;

    use super::*;

    fn plain(text_offset: u64, image_size: u64, flags: u64) -> Vec<u8> {
        let mut file = vec![0; 4096];
        file[8..16].copy_from_slice(&text_offset.to_le_bytes());
        file[16..24].copy_from_slice(&image_size.to_le_bytes());
        file[24..32].copy_from_slice(&flags.to_le_bytes());
        file[56..60].copy_from_slice(MAGIC);
        file
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn zboot_with(packing: &str, payload: &[u8]) -> Vec<u8> {
        let mut file = vec![0; 64];
        file[..8].copy_from_slice(b"MZ\0\0zimg");
        file[8..12].copy_from_slice(&64u32.to_le_bytes());
        file[12..16].copy_from_slice(&u32::try_from(payload.len()).unwrap().to_le_bytes());
        file[24..24 + packing.len()].copy_from_slice(packing.as_bytes());
        file.extend_from_slice(payload);
        file
    }

    #[test]
    fn a_plain_image_tells_its_place_and_size() {
        let image = Image::from_file(plain(0, 0x10_0000, 0xa)).unwrap();

        assert_eq!(image.text_offset, Bytes(0));
        assert_eq!(image.size, Bytes::mib(1));
        assert_eq!(image.bytes.len(), 4096);
    }

    #[test]
    fn an_old_image_lies_where_old_images_do() {
        let image = Image::from_file(plain(0, 0, 0)).unwrap();

        assert_eq!(image.text_offset, Bytes::kib(512));
        assert_eq!(image.size, Bytes(4096));
    }

    #[test]
    fn every_packing_gives_the_same_image() {
        let file = plain(0, 0x10_0000, 0xa);
        let zstd = ruzstd::encoding::compress_to_vec(
            file.as_slice(),
            ruzstd::encoding::CompressionLevel::Fastest,
        );
        let expected = Image::from_file(file.clone()).unwrap();

        for packed in [
            gzip(&file),
            zboot_with("gzip", &gzip(&file)),
            zboot_with("zstd", &zstd),
        ] {
            assert_eq!(Image::from_file(packed).unwrap(), expected);
        }
    }

    #[test]
    fn what_cannot_be_started_says_why() {
        let said = |file: Vec<u8>| Image::from_file(file).unwrap_err().to_string();

        assert!(said(b"\x7fELF...".to_vec()).contains("[7f, 45, 4c, 46]"));
        assert!(said(Vec::new()).contains("no arm64 kernel image"));
        assert!(said(plain(0, 0x10_0000, 1)).contains("big-endian"));
        assert!(said(plain(0, 1 << 40, 0)).contains("512M"));
        assert!(said(zboot_with("lzma", b"x")).contains("'lzma'"));
        assert!(said(gzip(b"nothing")).contains("no arm64 kernel image"));
        let mut cut = zboot_with("gzip", &gzip(&plain(0, 0, 0)));
        cut.truncate(80);
        assert!(said(cut).contains("copied whole"));
    }

    proptest! {
        #[test]
        fn no_file_does_harm(
            head in prop::sample::select(vec![
                plain(0, 0, 0), gzip(&plain(0, 0, 0)),
                zboot_with("gzip", &gzip(&plain(0, 0, 0))), zboot_with("zstd", b"(\xb5/\xfd"),
            ]),
            damage in prop::collection::vec((0usize..128, any::<u8>()), 0..8),
            cut in 0usize..4096,
        ) {
            let mut file = head;
            for (at, byte) in damage {
                if let Some(place) = file.get_mut(at) {
                    *place = byte;
                }
            }
            file.truncate(cut.max(1));
            if let Ok(image) = Image::from_file(file) {
                prop_assert!(image.size.0 >= image.bytes.len() as u64);
                prop_assert!(image.size <= LARGEST);
            }
        }
    }
}
