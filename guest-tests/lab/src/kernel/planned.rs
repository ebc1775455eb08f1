// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A kernel of a plan: a kernel to build, identified by its inputs, or an image.

use std::path::PathBuf;

use granule_types::record::Series;
use serde::{Deserialize, Serialize};

use crate::{
    error::LabError,
    kernel::{build::Build, image::Kernel},
    shell::sha256,
    values::PageSize,
};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedKernel {
    pub name: String,
    pub title: Option<String>,
    /// Base page size.
    pub page_size: PageSize,
    /// Git tree of the source.
    pub tree: Option<String>,
    pub commit: Option<String>,
    pub series: Option<Vec<Series>>,
    pub compiler: Option<String>,
    /// SHA-256 of the configuration fragments.
    pub config_sha256: Option<String>,
    /// SHA-256 of an image that is not built here.
    pub image_sha256: Option<String>,
    /// Path after the build, whose directory is named by the hash of all inputs; `None` if the tree
    /// is not known.
    pub image: Option<PathBuf>,
}

impl PlannedKernel {
    pub fn of_build(build: &Build<'_>) -> Self {
        let recipe = build.recipe;
        let is_known = !recipe.tree.is_placeholder();
        Self {
            name: recipe.name.clone(),
            title: recipe.title.clone(),
            page_size: build.page_size,
            tree: is_known.then(|| recipe.tree.to_string()),
            commit: recipe.commit.as_ref().map(|commit| commit.hash.clone()),
            series: recipe.series.clone(),
            compiler: Some(build.compiler().to_owned()),
            config_sha256: Some(sha256(build.fragment.as_bytes())),
            image_sha256: None,
            image: is_known.then(|| build.image()),
        }
    }

    pub fn of_image(kernel: &Kernel) -> Self {
        Self {
            name: kernel.name.clone(),
            title: None,
            page_size: kernel.page_size,
            tree: None,
            commit: None,
            series: None,
            compiler: None,
            config_sha256: None,
            image_sha256: Some(kernel.image_sha256.clone()),
            image: Some(kernel.image.clone()),
        }
    }

    /// Reports whether the kernel is built in the cache.
    pub const fn is_to_build(&self) -> bool {
        self.image_sha256.is_none()
    }

    pub fn is_built(&self) -> bool {
        self.image.as_ref().is_some_and(|image| image.is_file())
    }

    /// Returns the Git tree of the source, or the SHA-256 of an image.
    pub fn source_hash(&self) -> Option<String> {
        self.tree.clone().or_else(|| self.image_sha256.clone())
    }

    /// Opens the built kernel.
    pub fn open(&self) -> Result<Kernel, LabError> {
        let Some(image) = self.image.as_ref().filter(|image| image.is_file()) else {
            return Err(LabError::Unusable(format!(
                "the kernel '{}' is not built: execute the steps before this one first",
                self.name
            )));
        };
        let kernel = Kernel::open(self.name.clone(), image)?;
        Ok(Kernel {
            title: self.title.clone(),
            series: self.series.clone(),
            commit: self.commit.clone(),
            tree: self.tree.clone(),
            compiler: self.compiler.clone(),
            ..kernel
        })
    }
}

/// Returns the base page size of all kernels.
///
/// # Errors
/// The kernels have different page sizes, so no job has the same memory on all.
pub fn common_page_size(kernels: &[PlannedKernel]) -> Result<PageSize, LabError> {
    let mut sizes = kernels.iter().map(|kernel| (&kernel.name, kernel.page_size));
    let Some((first, size)) = sizes.next() else { return Ok(PageSize::default()) };
    match sizes.find(|(_, other)| *other != size) {
        None => Ok(size),
        Some((other, other_size)) => Err(LabError::Unusable(format!(
            "the kernel '{first}' has base pages of {}, '{other}' of {}: a comparison requires \
             equal pages",
            size.base(),
            other_size.base()
        ))),
    }
}
