// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Kernel images: the arm64 `Image`, a gzip-compressed `Image`, and the EFI "zboot" image that
//! distributions install as `vmlinuz`, whose payload is compressed with gzip or zstd.
//!
//! An `Image` starts with a header of 64 bytes (`Documentation/arch/arm64/booting.rst`, section 4):
//! `text_offset` at 8, `image_size` at 16, flags at 24, `ARM\x64` at 56. A zboot image
//! (`drivers/firmware/efi/libstub/zboot-header.S`) has `MZ` at 0, `zimg` at 4, offset and size of
//! the payload at 8 and 12, and the name of the compression at 24. All numbers are little-endian.
//!
//! The header is read here because the boot layout needs the size before the VM exists; the
//! `linux-loader` crate loads the image (see [`crate::arch::guest`]): an `Image` straight from its file, so
//! that no other memory than the guest's holds it. An ELF `vmlinux` is refused: that crate loads ELF on x86
//! only.
//!
//! Files are untrusted: lengths are checked, and decompression stops at [`MAX_IMAGE_SIZE`] bytes.

use std::io::{self, Read, Seek, SeekFrom};

use granule_types::units::Bytes;

use super::BootError;

/// Maximum size of an uncompressed kernel, which exceeds that of a kernel with all drivers built
/// in.
pub const MAX_IMAGE_SIZE: Bytes = Bytes::mib(512);

const MAGIC_OFFSET: usize = 56;
const IMAGE_MAGIC: &[u8] = b"ARM\x64";
const GZIP_MAGIC: &[u8] = &[0x1f, 0x8b];
/// Text offset of kernels before Linux 3.17, whose header has no image size.
const LEGACY_TEXT_OFFSET: u64 = 0x8_0000;

/// Bytes of the header.
const HEADER_SIZE: usize = 64;

/// Uncompressed kernel image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// Content of a file that is compressed; without it, the file is the image.
    pub uncompressed: Option<Vec<u8>>,
    /// Offset of the load address from a 2M boundary.
    pub text_offset: Bytes,
    /// Memory that the kernel occupies, including its BSS.
    pub size: Bytes,
}

impl Image {
    /// Parses a kernel file, and decompresses it if it is compressed.
    ///
    /// # Errors
    /// The file cannot be read or is not a kernel image, or its decompressed size exceeds
    /// [`MAX_IMAGE_SIZE`].
    pub fn from_file(file: impl Read + Seek) -> Result<Self, BootError> {
        Self::with_limit(file, MAX_IMAGE_SIZE)
    }

    /// Parses a kernel file as [`Image::from_file`] does, with a maximum size of `limit`.
    pub fn with_limit(mut file: impl Read + Seek, limit: Bytes) -> Result<Self, BootError> {
        let length = file.seek(SeekFrom::End(0)).map_err(BootError::Read)?;
        let mut read = |size: u64| {
            let mut bytes = Vec::new();
            file.rewind()?;
            file.by_ref().take(size).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        let header = read(HEADER_SIZE as u64).map_err(BootError::Read)?;
        if !is_zboot(&header) && !header.starts_with(GZIP_MAGIC) {
            return Self::parse(&header, length, None, limit);
        }
        let compressed = read(limit.0 + 1).map_err(BootError::Read)?;
        let bytes = match is_zboot(&header) {
            true => decompress_zboot(&compressed, limit)?,
            false => gunzip(&compressed, limit)?,
        };
        let header = bytes[..bytes.len().min(HEADER_SIZE)].to_vec();
        Self::parse(&header, bytes.len() as u64, Some(bytes), limit)
    }

    /// Parses the header of an image of `length` bytes.
    fn parse(
        header: &[u8],
        length: u64,
        uncompressed: Option<Vec<u8>>,
        limit: Bytes,
    ) -> Result<Self, BootError> {
        if header.get(MAGIC_OFFSET..MAGIC_OFFSET + IMAGE_MAGIC.len()) != Some(IMAGE_MAGIC) {
            return Err(BootError::InvalidInput(format!(
                "not an arm64 kernel image (Image, Image.gz, or an EFI zboot vmlinuz): the file \
                 starts with {:02x?}",
                &header[..header.len().min(4)]
            )));
        }
        let [text_offset, image_size, flags] = match [8, 16, 24].map(|at| read_u64(header, at)) {
            [Some(text_offset), Some(image_size), Some(flags)] => [text_offset, image_size, flags],
            _ => return Err(truncated_file_error("header")),
        };
        if flags & 1 != 0 {
            let text = "a big-endian kernel (CONFIG_CPU_BIG_ENDIAN) is not supported";
            return Err(BootError::InvalidInput(text.to_owned()));
        }
        let (text_offset, size) = match image_size {
            0 => (LEGACY_TEXT_OFFSET, length),
            size => (text_offset, size.max(length)),
        };
        if length > limit.0 || size > limit.0 || text_offset > limit.0 {
            return Err(size_limit_error(limit));
        }
        Ok(Self { uncompressed, text_offset: Bytes(text_offset), size: Bytes(size) })
    }
}

fn is_zboot(header: &[u8]) -> bool {
    header.starts_with(b"MZ") && header.get(4..8) == Some(b"zimg")
}

/// Returns the decompressed payload of a zboot image.
fn decompress_zboot(file: &[u8], limit: Bytes) -> Result<Vec<u8>, BootError> {
    let truncated = || truncated_file_error("payload");
    let word = |at: usize| -> Option<usize> {
        let bytes: [u8; 4] = file.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_le_bytes(bytes)).ok()
    };
    let (offset, size) = word(8).zip(word(12)).ok_or_else(truncated)?;
    let end = offset.checked_add(size).ok_or_else(truncated)?;
    let payload = file.get(offset..end).ok_or_else(truncated)?;
    let name = file.get(24..MAGIC_OFFSET).ok_or_else(truncated)?;
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    match name {
        b"gzip" => gunzip(payload, limit),
        b"zstd" | b"zstd22" => unzstd(payload, limit),
        other => Err(BootError::InvalidInput(format!(
            "compression '{}' is not supported: build the kernel with CONFIG_KERNEL_GZIP or \
             CONFIG_KERNEL_ZSTD",
            String::from_utf8_lossy(other)
        ))),
    }
}

fn truncated_file_error(part: &str) -> BootError {
    BootError::InvalidInput(format!("the file ends before its {part}: copy it again"))
}

fn size_limit_error(limit: Bytes) -> BootError {
    BootError::InvalidInput(format!("the uncompressed kernel is larger than {limit}"))
}

fn gunzip(compressed: &[u8], limit: Bytes) -> Result<Vec<u8>, BootError> {
    read_with_limit("gzip", flate2::read::GzDecoder::new(compressed), limit)
}

fn unzstd(compressed: &[u8], limit: Bytes) -> Result<Vec<u8>, BootError> {
    let failed = |source: io::Error| BootError::Decompress { compression: "zstd", source };
    let decoder = ruzstd::decoding::StreamingDecoder::new(compressed)
        .map_err(|error| failed(io::Error::other(error.to_string())))?;
    read_with_limit("zstd", decoder, limit)
}

fn read_with_limit(
    compression: &'static str,
    reader: impl Read,
    limit: Bytes,
) -> Result<Vec<u8>, BootError> {
    let mut uncompressed = Vec::new();
    reader
        .take(limit.0 + 1)
        .read_to_end(&mut uncompressed)
        .map_err(|source| BootError::Decompress { compression, source })?;
    if uncompressed.len() as u64 > limit.0 {
        return Err(size_limit_error(limit));
    }
    Ok(uncompressed)
}

fn read_u64(bytes: &[u8], offset: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(offset..offset + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use std::io::{Cursor, Write};

    use flate2::{Compression, write::GzEncoder};
    use proptest::prelude::*;

    use super::*;

    fn plain_image(text_offset: u64, image_size: u64, flags: u64) -> Vec<u8> {
        let mut file = vec![0; 4096];
        file[8..16].copy_from_slice(&text_offset.to_le_bytes());
        file[16..24].copy_from_slice(&image_size.to_le_bytes());
        file[24..32].copy_from_slice(&flags.to_le_bytes());
        file[56..60].copy_from_slice(IMAGE_MAGIC);
        file
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn zboot_file(compression: &str, payload: &[u8]) -> Vec<u8> {
        let mut file = vec![0; 64];
        file[..8].copy_from_slice(b"MZ\0\0zimg");
        file[8..12].copy_from_slice(&64u32.to_le_bytes());
        file[12..16].copy_from_slice(&u32::try_from(payload.len()).unwrap().to_le_bytes());
        file[24..24 + compression.len()].copy_from_slice(compression.as_bytes());
        file.extend_from_slice(payload);
        file
    }

    #[test]
    fn a_header_without_an_image_size_uses_the_legacy_text_offset() {
        for (image_size, text_offset, size) in
            [(0x10_0000, Bytes(0), Bytes::mib(1)), (0, Bytes::kib(512), Bytes::kib(4))]
        {
            let bytes = plain_image(0, image_size, 0xa);

            let image = Image::from_file(Cursor::new(bytes)).unwrap();

            assert_eq!(image, Image { uncompressed: None, text_offset, size });
        }
    }

    #[test]
    fn every_compression_yields_the_same_image() {
        let file = plain_image(0, 0x10_0000, 0xa);
        let zstd = ruzstd::encoding::compress_to_vec(
            file.as_slice(),
            ruzstd::encoding::CompressionLevel::Fastest,
        );
        let plain = Image::from_file(Cursor::new(&file)).unwrap();
        let expected = Image { uncompressed: Some(file.clone()), ..plain };

        for compressed in [gzip(&file), zboot_file("gzip", &gzip(&file)), zboot_file("zstd", &zstd)]
        {
            assert_eq!(Image::from_file(Cursor::new(compressed)).unwrap(), expected);
        }
    }

    #[test]
    fn each_error_names_its_cause() {
        let error = |file: Vec<u8>| Image::from_file(Cursor::new(file)).unwrap_err().to_string();

        assert!(error(b"\x7fELF...".to_vec()).contains("[7f, 45, 4c, 46]"));
        assert!(error(Vec::new()).contains("not an arm64 kernel image"));
        assert!(error(plain_image(0, 0x10_0000, 1)).contains("big-endian"));
        assert!(error(plain_image(0, 1 << 40, 0)).contains("512M"));
        assert!(error(zboot_file("lzma", b"x")).contains("'lzma'"));
        assert!(error(gzip(b"nothing")).contains("not an arm64 kernel image"));
        let mut cut = zboot_file("gzip", &gzip(&plain_image(0, 0, 0)));
        cut.truncate(80);
        assert!(error(cut).contains("copy it again"));
    }

    proptest! {
        #[test]
        fn any_file_yields_an_image_within_the_limit_or_an_error(
            head in prop::sample::select(vec![
                plain_image(0, 0, 0),
                gzip(&plain_image(0, 0, 0)),
                zboot_file("gzip", &gzip(&plain_image(0, 0, 0))),
                zboot_file("zstd", b"(\xb5/\xfd"),
            ]),
            damage in prop::collection::vec((0usize..128, any::<u8>()), 0..8),
            cut in 0usize..4096,
        ) {
            let mut file = head;
            for (at, byte) in damage {
                if let Some(byte_at) = file.get_mut(at) {
                    *byte_at = byte;
                }
            }
            file.truncate(cut.max(1));
            let length = file.len();
            if let Ok(image) = Image::from_file(Cursor::new(file)) {
                let length = image.uncompressed.as_ref().map_or(length, Vec::len);
                prop_assert!(image.size.0 >= length as u64);
                prop_assert!(image.size <= MAX_IMAGE_SIZE);
            }
        }
    }
}
