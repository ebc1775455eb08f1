// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A kernel that is ready to boot.

use std::path::{Path, PathBuf};

use super::{
    emulator,
    frames::sha256,
    step::{self, StepError},
};
use granule_types::record::Series;

/// What tells an arm64 image, and where (the kernel's `Documentation/arm64/booting.rst`, 4).
const MAGIC: &[u8] = b"ARM\x64";
const MAGIC_AT: usize = 0x38;

/// A kernel image and what is known of it.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// What it is called in the run directory: `base`, or the series.
    pub name: String,
    /// The image.
    pub image: PathBuf,
    /// SHA-256 of the image.
    pub image_sha256: String,
    /// Its configuration, where known.
    pub config: Option<PathBuf>,
    /// What was applied to the source; `None` where not known.
    pub series: Option<Vec<Series>>,
    /// Functions whose entries are counted.
    pub functions: Vec<(String, u64)>,
}

impl Kernel {
    /// Describes a built image: `System.map` and configuration lie beside it or, in a build tree,
    /// at its top.
    ///
    /// # Errors
    /// The image cannot be read or is none.
    pub fn of(name: String, image: &Path, series: Option<Vec<Series>>) -> Result<Self, StepError> {
        let content = step::read(image)?;
        if content.get(MAGIC_AT..MAGIC_AT + MAGIC.len()) != Some(MAGIC) {
            return Err(StepError::NoImage(image.to_owned()));
        }
        let beside = |names: [&str; 2]| {
            let own = image.parent().unwrap_or(Path::new("."));
            let top = image.ancestors().nth(4).unwrap_or(own); // TOP/arch/arm64/boot/Image
            [own, top]
                .into_iter()
                .flat_map(|dir| names.map(|name| dir.join(name)))
                .find(|path| path.is_file())
        };
        let functions = match beside(["System.map", "System.map"]) {
            Some(map) => emulator::functions(&String::from_utf8_lossy(&step::read(&map)?)),
            None => Vec::new(),
        };
        Ok(Self {
            name,
            image: image.to_owned(),
            image_sha256: sha256(&content),
            config: beside([".config", "config"]),
            series,
            functions,
        })
    }

    /// A kernel that a dry run speaks of.
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
