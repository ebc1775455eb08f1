// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Kernel images: the arm64 `Image`, a gzip-compressed `Image`, and the EFI "zboot" image that
//! distributions install as `vmlinuz`, whose payload is compressed with gzip or zstd.
//!
//! An `Image` starts with a header of 64 bytes (`Documentation/arch/arm64/booting.rst`, section 4):
//! `text_offset` at 8, `image_size` at 16, flags at 24, `ARM\x64` at 56. A zboot image
//! (`drivers/firmware/efi/libstub/zboot-header.S`) has `MZ` at 0, `zimg` at 4, offset and size of
//! the payload at 8 and 12, and the name of the compression at 24. All numbers are little-endian.
//!
//! The header is read here because the boot layout needs the size before the VM exists. The
//! `linux-loader` crate loads an `Image` straight from its file (see [`crate::arch::guest`]), and a
//! compressed one is decompressed into guest memory. An ELF `vmlinux` is refused: that crate loads ELF on
//! x86 only.
//!
//! Files are untrusted: lengths are checked, and decompression stops at the size of the header, or at
//! [`MAX_IMAGE_SIZE`] bytes.

use std::io::{self, Read, Seek};

use granule_types::units::Bytes;

use super::{
    BootError,
    payload::{Compression, Payload},
};

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

/// Kernel image in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// Compressed image; without it, the file is the image.
    pub payload: Option<Payload>,
    /// Offset of the load address from a 2M boundary.
    pub text_offset: Bytes,
    /// Memory that the kernel occupies, including its BSS.
    pub size: Bytes,
}

impl Image {
    /// Parses a kernel file.
    ///
    /// # Errors
    /// The file cannot be read or is not a kernel image, or its uncompressed size exceeds
    /// [`MAX_IMAGE_SIZE`].
    pub fn from_file(file: impl Read + Seek) -> Result<Self, BootError> {
        Self::with_limit(file, MAX_IMAGE_SIZE)
    }

    /// Parses a kernel file as [`Image::from_file`] does, with a maximum size of `limit`.
    pub fn with_limit(mut file: impl Read + Seek, limit: Bytes) -> Result<Self, BootError> {
        let length = file.seek(io::SeekFrom::End(0)).map_err(BootError::Read)?;
        file.rewind().map_err(BootError::Read)?;
        let header = read_header(&mut file).map_err(BootError::Read)?;
        let payload = match is_zboot(&header) {
            true => zboot_payload(&header, length)?,
            false if header.starts_with(GZIP_MAGIC) => {
                Payload { compression: Compression::Gzip, offset: 0, size: length }
            }
            false => return Self::parse(&header, || Ok(length), None, limit),
        };
        let mut image = payload.decompress(file)?;
        let failed = payload.compression.failed();
        let header = read_header(&mut image).map_err(failed)?;
        let length = || {
            let rest = io::copy(&mut image.take(limit.0 + 1), &mut io::sink());
            Ok(header.len() as u64 + rest.map_err(payload.compression.failed())?)
        };
        Self::parse(&header, length, Some(payload), limit)
    }

    /// Parses the header of an image. `length` returns the bytes of an image whose header has no size.
    fn parse(
        header: &[u8],
        length: impl FnOnce() -> Result<u64, BootError>,
        payload: Option<Payload>,
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
        let (text_offset, size) = match (image_size, payload) {
            (0, _) => (LEGACY_TEXT_OFFSET, length()?),
            // The decompressed bytes are compared with the size when they are loaded.
            (size, Some(_)) => (text_offset, size),
            (size, None) => (text_offset, size.max(length()?)),
        };
        if size > limit.0 || text_offset > limit.0 {
            return Err(size_limit_error(limit));
        }
        Ok(Self { payload, text_offset: Bytes(text_offset), size: Bytes(size) })
    }
}

/// Returns the first bytes, fewer if there are no more.
fn read_header(file: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut header = Vec::new();
    file.take(HEADER_SIZE as u64).read_to_end(&mut header)?;
    Ok(header)
}

fn is_zboot(header: &[u8]) -> bool {
    header.starts_with(b"MZ") && header.get(4..8) == Some(b"zimg")
}

/// Returns the payload of a zboot image of `length` bytes.
fn zboot_payload(header: &[u8], length: u64) -> Result<Payload, BootError> {
    let truncated = || truncated_file_error("payload");
    let word = |at: usize| -> Option<u64> {
        let bytes: [u8; 4] = header.get(at..at + 4)?.try_into().ok()?;
        Some(u32::from_le_bytes(bytes).into())
    };
    let (offset, size) = word(8).zip(word(12)).ok_or_else(truncated)?;
    let name = header.get(24..MAGIC_OFFSET).ok_or_else(truncated)?;
    if offset + size > length {
        return Err(truncated());
    }
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    let compression = match name {
        b"gzip" => Compression::Gzip,
        b"zstd" | b"zstd22" => Compression::Zstd,
        other => {
            return Err(BootError::InvalidInput(format!(
                "compression '{}' is not supported: build the kernel with CONFIG_KERNEL_GZIP or \
                 CONFIG_KERNEL_ZSTD",
                String::from_utf8_lossy(other)
            )));
        }
    };
    Ok(Payload { compression, offset, size })
}

fn truncated_file_error(part: &str) -> BootError {
    BootError::InvalidInput(format!("the file ends before its {part}: copy it again"))
}

fn size_limit_error(limit: Bytes) -> BootError {
    BootError::InvalidInput(format!("the uncompressed kernel is larger than {limit}"))
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

    fn decompress(image: &Image, file: &[u8]) -> Result<Vec<u8>, BootError> {
        let mut bytes = Vec::new();
        let payload = image.payload.unwrap();
        payload.write(Cursor::new(file), image.size, |offset, part| {
            assert_eq!(offset, bytes.len() as u64);
            bytes.extend_from_slice(part);
            Ok(())
        })?;
        Ok(bytes)
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

            assert_eq!(image, Image { payload: None, text_offset, size });
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

        for compressed in [gzip(&file), zboot_file("gzip", &gzip(&file)), zboot_file("zstd", &zstd)]
        {
            let image = Image::from_file(Cursor::new(&compressed)).unwrap();

            assert_eq!(Image { payload: None, ..image.clone() }, plain);
            assert_eq!(decompress(&image, &compressed).unwrap(), file);
        }
    }

    #[test]
    fn an_image_is_loaded_no_further_than_its_header_says() {
        let file = gzip(&plain_image(0, 4000, 0xa));

        let image = Image::from_file(Cursor::new(&file)).unwrap();

        assert!(
            decompress(&image, &file).unwrap_err().to_string().contains("larger than the 4000")
        );
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
            if let Ok(image) = Image::from_file(Cursor::new(&file)) {
                let loaded = match image.payload {
                    Some(_) => decompress(&image, &file).map_or(0, |bytes| bytes.len()),
                    None => file.len(),
                };
                prop_assert!(image.size.0 >= loaded as u64);
                prop_assert!(image.size <= MAX_IMAGE_SIZE);
            }
        }
    }
}
