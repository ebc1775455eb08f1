// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Options of `granule lab zap`.

use clap::value_parser;
use granule_types::units::{Bytes, parse_nonzero_size};
use serde::{Deserialize, Serialize};

use super::{CommonOptions, Options, ReportOptions, Workload};
use crate::{host::zap::ZapCall, values::PageSize};

/// Removals of anonymous memory from the page tables of a process, on each kernel.
#[derive(Debug, Clone, clap::Args, Serialize, Deserialize)]
#[command(next_help_heading = "Workload")]
pub struct ZapMatrix {
    /// Size of the memory, rounded up to a huge page
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = parse_nonzero_size)]
    pub(crate) size: Bytes,
    /// Order of the folios, which are mapped by pages; separate orders by commas [default: 0 and the
    /// order of a huge page, which is 9 with 4K pages]
    #[arg(long, value_name = "ORDER", value_delimiter = ',', value_parser = value_parser!(u32).range(..=13))]
    order: Vec<u32>,
    /// Measured system call; separate calls by commas
    #[arg(
        long,
        value_enum,
        value_name = "CALL",
        value_delimiter = ',',
        default_value = "dontneed,munmap"
    )]
    pub(crate) call: Vec<ZapCall>,
}

impl ZapMatrix {
    /// Returns the orders of the folios on hosts with this page size.
    pub(crate) fn orders(&self, page_size: PageSize) -> Vec<u32> {
        let huge = page_size.huge_page().0 / page_size.base().0;
        match self.order.as_slice() {
            [] => vec![0, huge.ilog2()],
            orders => orders.to_vec(),
        }
    }
}

impl Options {
    /// Returns removals of memory from the page tables of a process, on each kernel.
    pub fn zap(common: CommonOptions, matrix: ZapMatrix) -> Self {
        let workload = Workload::Zap(matrix);
        Self { common, workload, report: ReportOptions::default(), check: None }
    }
}
