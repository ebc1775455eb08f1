// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Requests of the control socket: HTTP/1.1 parsing and routing.
//!
//! | request | response |
//! |---|---|
//! | `GET /v1/state` | `{"state": "running", …}` |
//! | `POST /v1/pause`, `/v1/resume`, `/v1/stop` | the resulting state |
//! | `GET /v1/memory` | backing, and resident and mapped bytes by page size, of each zone |
//! | `POST /v1/memory/collapse` | collapses small pages into huge pages (THP); each zone's memory |
//! | `GET /v1/counters` | all counters |
//! | `POST /v1/dirty/start`, `/v1/dirty/stop` | starts or stops dirty logging, unless incremental snapshots use it |
//! | `GET /v1/dirty` | pages written since logging started or the log was cleared, by zone |
//! | `POST /v1/dirty/clear` | clears the dirty log |
//! | `POST /v1/snapshot` | saves the VM to the directory of `--snapshot`; bytes of memory, of its data and of the new files, and the time in which the guest was stopped |
//! | `POST /v1/snapshot/live` | does so while the guest runs, and stops it only to save what it has changed meanwhile |
//! | `POST /v1/balloon/SIZE` | sets the size of the balloon |
//! | `GET /metrics` | all counters in the text format of Prometheus |
//! | `GET /v1/counters?mapped`, `/metrics?mapped` | the same with what stage 2 maps; faults of the guest wait |

use granule_types::units::Bytes;
use serde_json::{Value, json};

/// Maximum size of a request with its body, in bytes.
const MAX_REQUEST_SIZE: usize = 8 << 10;
const MAX_HEADERS: usize = 32;

/// A request of a control socket client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the table above describes each request")]
pub enum ApiRequest {
    State,
    Pause,
    Resume,
    Stop,
    Memory,
    Collapse,
    Counters { mapped: bool },
    Metrics { mapped: bool },
    DirtyLogging(bool),
    DirtyPages,
    ClearDirtyLog,
    ResizeBalloon(Bytes),
    Snapshot,
    LiveSnapshot,
}

/// Body of a response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Body {
    /// A JSON value.
    Json(Value),
    /// Text format of Prometheus.
    Metrics(String),
}

impl Body {
    /// Returns the media type.
    pub const fn content_type(&self) -> &'static str {
        match self {
            Self::Json(_) => "application/json",
            Self::Metrics(_) => "text/plain; version=0.0.4",
        }
    }

    /// Returns the body as it is sent.
    pub fn into_text(self) -> String {
        match self {
            Self::Json(value) => value.to_string(),
            Self::Metrics(text) => text,
        }
    }
}

impl From<Value> for Body {
    fn from(value: Value) -> Self {
        Self::Json(value)
    }
}

/// A response: HTTP status and body.
pub type Response = (u16, Body);

/// Returns the response to a refused request.
pub fn error_response(status: u16, reason: &str) -> Response {
    (status, json!({ "error": reason }).into())
}

/// Parses the bytes that a client has sent so far. Returns `None` if the request needs more bytes.
///
/// # Errors
/// The response to an invalid request.
pub fn parse(bytes: &[u8]) -> Result<Option<ApiRequest>, Response> {
    let too_large = || error_response(413, "the request is larger than 8K");
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut head = httparse::Request::new(&mut headers);
    let parsed = head.parse(bytes).map_err(|error| error_response(400, &error.to_string()))?;
    let head_length = match parsed {
        httparse::Status::Complete(length) => length,
        httparse::Status::Partial if bytes.len() < MAX_REQUEST_SIZE => return Ok(None),
        httparse::Status::Partial => return Err(too_large()),
    };
    let body_length = body_length(head.headers).map_err(|reason| error_response(400, reason))?;
    let length = head_length.checked_add(body_length);
    let length = length.filter(|length| *length <= MAX_REQUEST_SIZE).ok_or_else(too_large)?;
    if bytes.len() < length {
        return Ok(None);
    }
    route(head.method.unwrap_or_default(), head.path.unwrap_or_default()).map(Some)
}

fn body_length(headers: &[httparse::Header<'_>]) -> Result<usize, &'static str> {
    let mut length = 0;
    for header in headers {
        if header.name.eq_ignore_ascii_case("transfer-encoding") {
            return Err("Transfer-Encoding is not supported: send Content-Length, or no body");
        }
        if header.name.eq_ignore_ascii_case("content-length") {
            let value = std::str::from_utf8(header.value).ok();
            length = value
                .and_then(|value| value.trim().parse().ok())
                .ok_or("Content-Length is not a number")?;
        }
    }
    Ok(length)
}

fn route(method: &str, path: &str) -> Result<ApiRequest, Response> {
    // A scraper of metrics sends parameters with a value, which may be empty.
    let is_mapped = |query| matches!(query, "mapped" | "mapped=");
    let (path, mapped) = match path.split_once('?') {
        Some((path @ ("/v1/counters" | "/metrics"), query)) if is_mapped(query) => (path, true),
        _ => (path, false),
    };
    let (expected, request) = match path {
        "/v1/state" => ("GET", ApiRequest::State),
        "/v1/pause" => ("POST", ApiRequest::Pause),
        "/v1/resume" => ("POST", ApiRequest::Resume),
        "/v1/stop" => ("POST", ApiRequest::Stop),
        "/v1/memory" => ("GET", ApiRequest::Memory),
        "/v1/memory/collapse" => ("POST", ApiRequest::Collapse),
        "/v1/counters" => ("GET", ApiRequest::Counters { mapped }),
        "/metrics" => ("GET", ApiRequest::Metrics { mapped }),
        "/v1/dirty" => ("GET", ApiRequest::DirtyPages),
        "/v1/dirty/start" => ("POST", ApiRequest::DirtyLogging(true)),
        "/v1/dirty/stop" => ("POST", ApiRequest::DirtyLogging(false)),
        "/v1/dirty/clear" => ("POST", ApiRequest::ClearDirtyLog),
        "/v1/snapshot" => ("POST", ApiRequest::Snapshot),
        "/v1/snapshot/live" => ("POST", ApiRequest::LiveSnapshot),
        _ => match path.strip_prefix("/v1/balloon/").map(str::parse::<Bytes>) {
            Some(Ok(size)) => ("POST", ApiRequest::ResizeBalloon(size)),
            Some(Err(error)) => return Err(error_response(400, &format!("{path}: {error}"))),
            None => {
                let paths = "unknown path; expected one of /v1/state, pause, resume, stop, \
                             memory, memory/collapse, counters, dirty, dirty/start, dirty/stop, \
                             dirty/clear, snapshot, snapshot/live, balloon/SIZE, or /metrics";
                return Err(error_response(404, paths));
            }
        },
    };
    if method != expected {
        let reason = format!("{path} does not support {method}: use {expected}");
        return Err(error_response(405, &reason));
    }
    Ok(request)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_request_needs_its_body_and_is_limited_in_size() {
        let head = "POST /v1/stop HTTP/1.1\r\nContent-Length: 4\r\n\r\n";
        let request = format!("{head}{{}}\r\n");

        for end in 0..request.len() {
            let parsed = parse(&request.as_bytes()[..end]);
            assert_eq!(parsed, Ok(None), "{end}");
        }
        let parsed = parse(request.as_bytes());
        assert_eq!(parsed, Ok(Some(ApiRequest::Stop)));
        let large = format!("GET /v1/state HTTP/1.1\r\nx: {}", "y".repeat(MAX_REQUEST_SIZE));
        let body = "GET /v1/state HTTP/1.1\r\nContent-Length: 18446744073709551615\r\n\r\n";
        for request in [large.as_str(), body] {
            let parsed = parse(request.as_bytes());
            assert!(matches!(parsed, Err((413, _))));
        }
    }

    #[test]
    fn an_invalid_request_is_rejected_with_its_status() {
        for (request, status) in [
            ("GET /v2/state HTTP/1.1\r\n\r\n", 404),
            ("GET /v1/pause HTTP/1.1\r\n\r\n", 405),
            ("POST /v1/state HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
            ("POST /v1/stop HTTP/1.1\r\nContent-Length: x\r\n\r\n", 400),
            ("\x7f\r\n\r\n", 400),
        ] {
            let parsed = parse(request.as_bytes());
            assert!(
                matches!(parsed, Err((actual, _)) if actual == status),
                "{request}: {parsed:?}"
            );
        }
    }

    #[test]
    fn counters_and_metrics_have_a_parameter() {
        let parse = |path| parse(format!("GET {path} HTTP/1.1\r\n\r\n").as_bytes());

        for (path, request) in [
            ("/v1/counters", ApiRequest::Counters { mapped: false }),
            ("/v1/counters?mapped", ApiRequest::Counters { mapped: true }),
            ("/metrics", ApiRequest::Metrics { mapped: false }),
            ("/metrics?mapped=", ApiRequest::Metrics { mapped: true }),
        ] {
            assert_eq!(parse(path), Ok(Some(request)), "{path}");
        }
        for path in ["/metrics?", "/metrics?mapped=off", "/v1/state?mapped"] {
            assert!(matches!(parse(path), Err((404, _))), "{path}");
        }
    }

    proptest! {
        #[test]
        fn parse_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..9000)) {
            let _ = parse(&bytes);
        }
    }
}
