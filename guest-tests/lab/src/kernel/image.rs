// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A kernel that is ready to boot.

use std::{
    io,
    path::{Path, PathBuf},
};

use granule_types::record::Series;

use crate::{
    command::CommandError, digest::sha256, kernel::counted_functions::counted_functions, shell,
};

/// Magic number of an arm64 image and its offset (`Documentation/arch/arm64/booting.rst`, 4).
const MAGIC: &[u8] = b"ARM\x64";
const MAGIC_OFFSET: usize = 0x38;

/// A kernel image and its properties.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// Name in the run directory: `base`, or the series.
    pub name: String,
    pub image: PathBuf,
    pub image_sha256: String,
    /// The configuration, if known.
    pub config: Option<PathBuf>,
    /// The series applied to the source, if known.
    pub series: Option<Vec<Series>>,
    /// Name and address of the functions whose calls are counted.
    pub functions: Vec<(String, u64)>,
}

impl Kernel {
    /// Describes an image. `System.map` and configuration are beside it or, in a build tree, at the
    /// top.
    pub fn open(
        name: String,
        image: &Path,
        series: Option<Vec<Series>>,
    ) -> Result<Self, CommandError> {
        let content = shell::read(image)?;
        if content.get(MAGIC_OFFSET..MAGIC_OFFSET + MAGIC.len()) != Some(MAGIC) {
            let not_image = io::Error::new(
                io::ErrorKind::InvalidData,
                "it is not an arm64 kernel image: pass an uncompressed Image, as a build leaves it \
                 in arch/arm64/boot",
            );
            return Err(CommandError::file("boot", image, not_image));
        }
        let find = |names: &[&str]| {
            let own = image.parent().unwrap_or(Path::new("."));
            let top = image.ancestors().nth(4).unwrap_or(own); // TOP/arch/arm64/boot/Image
            [own, top]
                .into_iter()
                .flat_map(|directory| names.iter().map(|name| directory.join(name)))
                .find(|path| path.is_file())
        };
        let functions = match find(&["System.map"]) {
            Some(map) => counted_functions(&String::from_utf8_lossy(&shell::read(&map)?)),
            None => Vec::new(),
        };
        Ok(Self {
            name,
            image: image.to_owned(),
            image_sha256: sha256(&content),
            config: find(&[".config", "config"]),
            series,
            functions,
        })
    }

    /// Returns a kernel that a dry run would build.
    pub fn planned(name: String, image: PathBuf, series: Option<Vec<Series>>) -> Self {
        Self {
            name,
            image,
            image_sha256: "SHA256".to_owned(),
            config: None,
            series,
            functions: Vec::new(),
        }
    }
}
