// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Kernel and host of one side, for the head of a report.

use serde::Serialize;

use crate::{
    provenance,
    sample::{Sample, printable},
};
use granule_types::{record::Series, units::Bytes};

/// One side. Where samples differ (by force only), the first one stands for all.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Side {
    /// Name of the side.
    pub label: String,
    /// `uname -r`; empty if unknown.
    pub kernel: String,
    /// Series applied; `None` if unknown.
    pub series: Option<Vec<Series>>,
    /// SHA-256 of the kernel image.
    pub image_sha256: Option<String>,
    /// Name of the CPU.
    pub cpu: Option<String>,
    /// CPU features as `name=value`; empty if unknown.
    pub features: String,
    /// Base page of the host.
    pub page_size: Option<Bytes>,
    /// Emulator; `None` on hardware and if the host is unknown.
    pub emulator: Option<String>,
}

impl Side {
    /// Returns the side of these samples.
    pub fn of(label: String, samples: &[Sample]) -> Self {
        let host = samples.first().map(|sample| sample.host.clone());
        let host = host.unwrap_or_default();
        Self {
            label: printable(&label),
            features: provenance::features(&host).unwrap_or_default(),
            kernel: host.kernel,
            series: host.series,
            image_sha256: host.image_sha256,
            cpu: host.cpu,
            page_size: host.page_size,
            emulator: host.emulator,
        }
    }

    /// Reports whether the side ran under an emulator.
    pub const fn is_emulated(&self) -> bool {
        self.emulator.is_some()
    }

    /// Returns the series applied; `None` if unknown.
    pub fn series_line(&self) -> Option<String> {
        series_line(self.series.as_deref())
    }

    /// Returns kernel, series and image in one line; `None` if unknown.
    pub fn kernel_line(&self) -> Option<String> {
        if self.kernel.is_empty() {
            return None;
        }
        let series = self.series_line();
        let series = series.unwrap_or_else(|| "series not known".to_owned());
        let image = self.image_sha256.as_deref().and_then(|hash| hash.get(..12));
        let image = image.map(|start| format!(", image {start}"));
        Some(format!("Linux {}, {series}{}", self.kernel, image.unwrap_or_default()))
    }
}

/// Returns series in words; `None` if unknown.
pub fn series_line(series: Option<&[Series]>) -> Option<String> {
    let series = series?;
    if series.is_empty() {
        return Some("no series".to_owned());
    }
    let each = series.iter().map(|series| match series.patches {
        // A policy of the model has no patches.
        0 => series.name.clone(),
        1 => format!("{} (1 patch)", series.name),
        patches => format!("{} ({patches} patches)", series.name),
    });
    Some(each.collect::<Vec<_>>().join(" + "))
}
