// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What one side of a comparison was: its kernel and its host, for the head of the report.

use serde::Serialize;

use crate::{
    provenance,
    sample::{Sample, printable},
};
use granule_types::{
    record::{Host, Series},
    units::Bytes,
};

/// One side. Where samples differ (only by force), the first one speaks for all.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Side {
    /// What it is called.
    pub label: String,
    /// `uname -r`; empty where not known.
    pub kernel: String,
    /// The series applied; `None` where not known.
    pub series: Option<Vec<Series>>,
    /// SHA-256 of the kernel image.
    pub image_sha256: Option<String>,
    /// The CPU's name.
    pub cpu: Option<String>,
    /// Its features, as `name=value`; empty where not known.
    pub features: String,
    /// The host's base page.
    pub page_size: Option<Bytes>,
    /// The emulator; `None` on hardware, and where nothing is known.
    pub emulator: Option<String>,
}

impl Side {
    /// Describes the side whose samples these are.
    pub fn of(label: String, samples: &[Sample]) -> Self {
        let host = samples.first().map(|sample| sample.host.clone());
        let host = host.unwrap_or_default();
        let features = if provenance::is_known(&host) {
            provenance::features(&host)
        } else {
            String::new()
        };
        let Host {
            arch: _,
            kernel,
            series,
            image_sha256,
            cpu,
            features: _,
            page_size,
            emulator,
        } = host;
        Self {
            label: printable(&label),
            kernel,
            series,
            image_sha256,
            cpu,
            features,
            page_size,
            emulator,
        }
    }

    /// Whether it ran under an emulator.
    pub const fn is_emulated(&self) -> bool {
        self.emulator.is_some()
    }

    /// The series applied; `None` where not known.
    pub fn series_line(&self) -> Option<String> {
        series_line(self.series.as_deref())
    }

    /// Kernel, series and image in one line; `None` where nothing is known.
    pub fn kernel_line(&self) -> Option<String> {
        if self.kernel.is_empty() {
            return None;
        }
        let series = self.series_line();
        let series = series.unwrap_or_else(|| "series not known".to_owned());
        let image = match self.image_sha256.as_deref().map(|hash| hash.get(..12)) {
            Some(Some(start)) => format!(", image {start}"),
            _ => String::new(),
        };
        Some(format!("Linux {}, {series}{image}", self.kernel))
    }
}

/// Series in words; `None` where not known.
pub fn series_line(series: Option<&[Series]>) -> Option<String> {
    let series = series?;
    if series.is_empty() {
        return Some("no series".to_owned());
    }
    let each = series.iter().map(|series| {
        match series.patches {
            // A policy of the model is no series of patches.
            0 => series.name.clone(),
            1 => format!("{} (1 patch)", series.name),
            patches => format!("{} ({patches} patches)", series.name),
        }
    });
    Some(each.collect::<Vec<_>>().join(" + "))
}
