// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The fixed matrix of a ledger. Another set of jobs is another matrix with another name, because
//! figures of different jobs are no trend.

use clap::Parser;

use crate::{
    error::LabError,
    jobs::matrix::{self, PlannedJob},
    options::{CommonOptions, Matrix, Options, ReportOptions},
};

/// Name of the matrix.
pub const NAME: &str = "1";
/// Workload options of each job: small enough for minutes on two CPUs, with one schedule, because
/// counts are exact. Aborts are counted by type, which adds work to each abort.
const JOBS: [&str; 4] = [
    "-s anonymous -b 16M -v 4 --seeds 1 --bench-arg=--events=fault-types",
    "-s anonymous_thp -b 16M -v 4 --seeds 1 --bench-arg=--events=fault-types",
    "-s anonymous_hugetlb_2mb -b 64M -v 4 --seeds 1 --bench-arg=--events=fault-types",
    "-s anonymous_hugetlb_2mb -b 64M -v 16 --seeds 1 --bench-arg=--events=fault-types",
];

#[derive(Debug, Parser)]
#[command(no_binary_name = true)]
struct Workload {
    #[command(flatten)]
    matrix: Matrix,
}

/// Returns the jobs of the matrix on each kernel.
///
/// # Errors
/// The page size of the kernels is unknown.
pub fn jobs(common: &CommonOptions) -> Result<Vec<PlannedJob>, LabError> {
    let page_size = common.kernels.build.page_size()?;
    let job = |line: &str| {
        // A test parses each line.
        let Workload { matrix } = Workload::parse_from(line.split_ascii_whitespace());
        let options = Options::page_table_test(common.clone(), matrix, ReportOptions::default());
        matrix::jobs(&options, page_size, &[])
    };
    Ok(JOBS.iter().copied().flat_map(job).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::matrix::tests::options;

    #[test]
    fn the_matrix_has_one_boot_for_each_job() {
        let jobs = jobs(&options("lab").common).unwrap();

        let names: Vec<_> = jobs.iter().map(|job| job.name.as_str()).collect();
        let expected = [
            "anonymous-16M-4v-seed0",
            "anonymous_thp-16M-4v-seed0",
            "anonymous_hugetlb_2mb-64M-4v-seed0",
            "anonymous_hugetlb_2mb-64M-16v-seed0",
        ];
        assert_eq!(names, expected);
        let counted = |job: &PlannedJob| job.job.argv.contains(&"--events=fault-types".to_owned());
        assert!(jobs.iter().all(counted));
    }
}
