// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `granule check`: checks a kept trace again.

use std::{
    fs::File,
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
};

use flate2::bufread::MultiGzDecoder;

use super::{
    defect::Checked,
    observation::Check,
    places::Places,
    setup::Setup,
    trace::{Line, Parser, TraceError},
};
use crate::error::LabError;

/// First bytes of a gzip file (RFC 1952, 2.3.1).
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// Lines within which a kept trace has its setup.
const SETUP_LINES: usize = 2;

/// Calls `use_line` with each line of a trace, which may be compressed.
pub fn read_trace(
    path: &Path,
    mut use_line: impl FnMut(&str) -> Result<(), TraceError>,
) -> Result<(), TraceError> {
    let mut file = BufReader::new(File::open(path)?);
    let is_compressed = file.fill_buf()?.starts_with(&GZIP_MAGIC);
    let input: Box<dyn Read> =
        if is_compressed { Box::new(MultiGzDecoder::new(file)) } else { Box::new(file) };
    let mut input = BufReader::new(input);
    let mut line = String::new();
    loop {
        line.clear();
        match input.read_line(&mut line) {
            Ok(0) => return Ok(()),
            Ok(_) => use_line(&line)?,
            // A compressed file ends within a block if it is truncated.
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                return Err(TraceError::Truncated);
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Checks a kept trace, which names the places in the kernel.
///
/// # Errors
/// The trace cannot be read, is incomplete or has no setup.
pub fn replay(options: &ReplayOptions) -> Result<(Setup, Checked), LabError> {
    let path = &options.trace;
    let unusable = |error: TraceError| {
        let reason = crate::error::with_causes(&error);
        LabError::Unusable(format!("cannot check {}: {reason}", path.display()))
    };
    let setup = read_setup(path).map_err(unusable)?;
    let places = Places::default();
    let mut check = Check::new(setup.clone(), &places);
    read_trace(path, |line| check.line(line).map(drop)).map_err(unusable)?;
    check.complete().map_err(unusable)?;
    Ok((setup, check.finish(None)))
}

/// Returns the setup of a kept trace.
fn read_setup(path: &Path) -> Result<Setup, TraceError> {
    let (mut parser, mut setup, mut lines) = (Parser::default(), None, 0);
    let read = read_trace(path, |line| {
        lines += 1;
        if let Line::Setup(found) = parser.line(line)? {
            setup = Some(*found);
        }
        // The error ends the read.
        if lines == SETUP_LINES { Err(TraceError::NoSetup) } else { Ok(()) }
    });
    match (setup, read) {
        (Some(setup), _) => Ok(setup),
        (None, Err(error)) => Err(error),
        (None, Ok(())) => Err(parser.finish().err().unwrap_or(TraceError::NoSetup)),
    }
}

/// A kept trace to check.
#[derive(Debug, clap::Args)]
pub struct ReplayOptions {
    /// Trace of `granule lab check --keep-trace`
    #[arg(value_name = "TRACE")]
    pub(crate) trace: PathBuf,
}

#[cfg(test)]
mod tests {
    use std::fs;

    use granule_stage2::check::machine::event::HEADER;

    use super::{
        super::{setup::tests::setup, trace::setup_line},
        *,
    };

    fn replay_text(text: &str) -> Result<Checked, String> {
        let directory = tempfile::tempdir().unwrap();
        let trace = directory.path().join("trace");
        fs::write(&trace, text).unwrap();
        let checked = replay(&ReplayOptions { trace }).map(|(_, checked)| checked);
        checked.map_err(|error| error.to_string())
    }

    #[test]
    fn a_complete_trace_is_checked() {
        let text = format!("{HEADER}\n{}0 isb\n# end events=1\n", setup_line(&setup()));

        assert_eq!(replay_text(&text).unwrap().summary.events, 1);
    }

    #[test]
    fn an_unusable_trace_is_one_error() {
        let head = format!("{HEADER}\n{}", setup_line(&setup()));
        for (text, reason) in [
            (String::new(), "it does not begin with"),
            ("x\n".to_owned(), "it does not begin with"),
            (format!("{HEADER}\n0 isb\n# end events=1\n"), "no line '# setup'"),
            (format!("{head}0 isb\n"), "no last line '# end'"),
            (format!("{head}x\n"), "line 3 is no event"),
            (format!("{head}63 isb\n# end events=1\n"), "CPU 63 of"),
        ] {
            let error = replay_text(&text).unwrap_err();

            assert!(error.contains(reason), "{text:?}: {error}");
        }
    }
}
