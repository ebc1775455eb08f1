// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The control socket: HTTP/1.1 and JSON on a Unix socket, one request a connection.
//!
//! | request | does, answers |
//! |---|---|
//! | `GET /v1/state` | `{"state": "running", …}` |
//! | `POST /v1/pause`, `/v1/resume`, `/v1/stop` | the state then |
//! | `GET /v1/memory` | each zone: what was asked for and what is resident, by page size |
//! | `POST /v1/memory/collapse` | has small pages put together into huge ones (THP); each zone then |
//! | `GET /v1/counters` | everything that is counted, as it stands now |
//! | `POST /v1/dirty/start`, `/v1/dirty/stop` | switches dirty logging |
//! | `GET /v1/dirty` | pages written since logging began or was last cleared, zone by zone |
//! | `POST /v1/dirty/clear` | forgets them |
//! | `POST /v1/balloon/SIZE` | has the guest put so much into the balloon |
//!
//! A thread of its own reads and answers; what is asked for is done by the main thread, between the
//! two is a channel. A client gets 2 s a step and 8K in all; a second one waits.

use std::{
    io,
    io::{Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    sync::mpsc,
    thread,
    time::Duration,
};

use granule_types::units::Bytes;
use serde_json::{Value, json};
use vmm_sys_util::eventfd::EventFd;

use super::socket::{Bound, Owned, SocketFile};

/// How long a client may take for each step.
const PATIENCE: Duration = Duration::from_secs(2);
/// The largest request, head and body.
const LARGEST: usize = 8 << 10;
const HEADERS: usize = 32;

/// What a client can ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// How the machine is.
    State,
    /// Stand still.
    Pause,
    /// Go on.
    Resume,
    /// End the machine.
    Stop,
    /// What backs guest memory.
    Memory,
    /// Put small pages together.
    Collapse,
    /// All counts.
    Counters,
    /// Switch dirty logging.
    DirtyLogging(bool),
    /// What is dirty.
    Dirty,
    /// Forget what is dirty.
    DirtyClear,
    /// Have the guest put that many bytes into the balloon.
    Balloon(u64),
}

/// The answer: an HTTP status and a body.
pub type Answer = (u16, Value);

/// A request on its way to the main thread.
#[derive(Debug)]
pub struct Asked {
    /// What is asked for.
    pub request: Request,
    answer: mpsc::SyncSender<Answer>,
}

impl Asked {
    /// Answers it.
    pub fn answer(self, answer: Answer) {
        // A client that has gone needs none.
        let _ = self.answer.send(answer);
    }
}

/// An answer to what cannot be done.
pub fn refusal(status: u16, why: &str) -> Answer {
    (status, json!({ "error": why }))
}

/// The socket, served until dropped; then its file goes. The thread waits for clients for ever and
/// ends with the process.
#[derive(Debug)]
pub struct Api {
    file: Owned,
    asked: mpsc::Receiver<Asked>,
    event: EventFd,
}

impl Bound {
    /// Serves it. `prepare` is called first on the serving thread.
    ///
    /// # Errors
    /// There is no thread or event to be had, or `prepare` fails.
    pub fn serve(
        self,
        prepare: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> io::Result<Api> {
        let Self { listener, file } = self;
        let event = EventFd::new(libc::EFD_NONBLOCK)?;
        let wake = event.try_clone()?;
        let (sender, asked) = mpsc::channel();
        let (ready, prepared) = mpsc::sync_channel(1);
        thread::Builder::new()
            .name("api".to_owned())
            .spawn(move || {
                let result = prepare();
                let go_on = result.is_ok();
                if ready.send(result).is_ok() && go_on {
                    serve(&listener, &sender, &wake);
                }
            })?;
        prepared.recv().map_err(io::Error::other)??;
        Ok(Api { file, asked, event })
    }
}

impl Api {
    /// Its file.
    pub const fn file(&self) -> &SocketFile {
        self.file.file()
    }

    /// Readable when a request waits.
    pub const fn event(&self) -> &EventFd {
        &self.event
    }

    /// The next request, if one waits.
    pub fn next(&self) -> Option<Asked> {
        let asked = self.asked.try_recv().ok();
        if asked.is_none() {
            // Nothing waits: what told of it is done. One that comes now tells again.
            let _ = self.event.read();
            return self.asked.try_recv().ok();
        }
        asked
    }
}

fn serve(listener: &UnixListener, to_main: &mpsc::Sender<Asked>, wake: &EventFd) {
    for client in listener.incoming() {
        let Ok(client) = client else {
            // Out of descriptors, most likely: others may give some back.
            thread::sleep(Duration::from_millis(100));
            continue;
        };
        if let Err(error) = attend(client, to_main, wake) {
            log::debug!("control socket: {error}");
        }
    }
}

fn attend(mut client: UnixStream, to_main: &mpsc::Sender<Asked>, wake: &EventFd) -> io::Result<()> {
    client.set_read_timeout(Some(PATIENCE))?;
    client.set_write_timeout(Some(PATIENCE))?;
    let (status, body) = match read(&mut client)? {
        Err(answer) => answer,
        Ok(request) => {
            let (answer, answered) = mpsc::sync_channel(1);
            let asked = Asked { request, answer };
            let sent = to_main.send(asked).is_ok() && wake.write(1).is_ok();
            match answered.recv() {
                Ok(answer) if sent => answer,
                _ => refusal(503, "the machine has ended"),
            }
        }
    };
    let body = body.to_string();
    write!(
        client,
        "HTTP/1.1 {status} {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n{body}",
        reason(status),
        body.len(),
    )
}

const fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        404 => "Not Found",
        405 => "Method Not Allowed",
        409 => "Conflict",
        413 => "Content Too Large",
        500 => "Internal Server Error",
        503 => "Service Unavailable",
        _ => "Bad Request",
    }
}

/// Reads a request, its body too, which no request needs.
fn read(client: &mut UnixStream) -> io::Result<Result<Request, Answer>> {
    let mut bytes = Vec::new();
    loop {
        match parse(&bytes) {
            Parsed::Whole(request) => return Ok(Ok(request)),
            Parsed::Refused(answer) => return Ok(Err(answer)),
            Parsed::Part => {}
        }
        let mut buffer = [0; 1024];
        match client.read(&mut buffer)? {
            0 => return Ok(Err(refusal(400, "the request ends too early"))),
            count => bytes.extend_from_slice(&buffer[..count]),
        }
    }
}

/// What there is of a request so far.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Parsed {
    /// All of it.
    Whole(Request),
    /// A part: more is to come.
    Part,
    /// What cannot become one.
    Refused(Answer),
}

/// Reads a request from the first bytes that a client has sent.
pub fn parse(bytes: &[u8]) -> Parsed {
    let too_large = || Parsed::Refused(refusal(413, "the request is larger than 8K"));
    let mut headers = [httparse::EMPTY_HEADER; HEADERS];
    let mut head = httparse::Request::new(&mut headers);
    let length = match head.parse(bytes) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) if bytes.len() < LARGEST => return Parsed::Part,
        Ok(httparse::Status::Partial) => return too_large(),
        Err(error) => return Parsed::Refused(refusal(400, &error.to_string())),
    };
    let mut body = 0usize;
    for header in &*head.headers {
        if header.name.eq_ignore_ascii_case("transfer-encoding") {
            return Parsed::Refused(refusal(400, "give the body's length, or no body"));
        }
        if header.name.eq_ignore_ascii_case("content-length") {
            let value = std::str::from_utf8(header.value).ok();
            match value.and_then(|value| value.trim().parse().ok()) {
                Some(length) => body = length,
                None => return Parsed::Refused(refusal(400, "Content-Length is no number")),
            }
        }
    }
    match length.checked_add(body) {
        Some(whole) if whole <= LARGEST => {
            if bytes.len() < whole {
                return Parsed::Part;
            }
        }
        _ => return too_large(),
    }
    match route(
        head.method.unwrap_or_default(),
        head.path.unwrap_or_default(),
    ) {
        Ok(request) => Parsed::Whole(request),
        Err(answer) => Parsed::Refused(answer),
    }
}

fn route(method: &str, path: &str) -> Result<Request, Answer> {
    let (wanted, request) = match path {
        "/v1/state" => ("GET", Request::State),
        "/v1/pause" => ("POST", Request::Pause),
        "/v1/resume" => ("POST", Request::Resume),
        "/v1/stop" => ("POST", Request::Stop),
        "/v1/memory" => ("GET", Request::Memory),
        "/v1/memory/collapse" => ("POST", Request::Collapse),
        "/v1/counters" => ("GET", Request::Counters),
        "/v1/dirty" => ("GET", Request::Dirty),
        "/v1/dirty/start" => ("POST", Request::DirtyLogging(true)),
        "/v1/dirty/stop" => ("POST", Request::DirtyLogging(false)),
        "/v1/dirty/clear" => ("POST", Request::DirtyClear),
        _ => match path.strip_prefix("/v1/balloon/").map(str::parse::<Bytes>) {
            Some(Ok(size)) => ("POST", Request::Balloon(size.0)),
            Some(Err(error)) => return Err(refusal(400, &format!("{path}: {error}"))),
            None => {
                return Err(refusal(
                    404,
                    "there are /v1/state, pause, resume, stop, memory, memory/collapse, counters, \
                     dirty, dirty/start, dirty/stop, dirty/clear and balloon/SIZE",
                ));
            }
        },
    };
    if method != wanted {
        return Err(refusal(405, &format!("{path} takes {wanted}")));
    }
    Ok(request)
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use proptest::prelude::*;

    use super::*;

    fn listen(path: &Path) -> io::Result<Api> {
        Bound::new(path)?.serve(|| Ok(()))
    }

    fn ask(path: &Path, request: &str) -> String {
        let mut client = UnixStream::connect(path).unwrap();
        client.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn a_request_reaches_the_main_thread_and_its_answer_the_client() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("api");
        let api = listen(&path).unwrap();
        let (to, client) = (path.clone(), "POST /v1/pause HTTP/1.1\r\n\r\n");
        let client = thread::spawn(move || ask(&to, client));

        let asked = loop {
            match api.next() {
                Some(asked) => break asked,
                None => thread::yield_now(),
            }
        };
        assert_eq!(asked.request, Request::Pause);
        asked.answer((200, json!({ "state": "paused" })));

        let answer = client.join().unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        assert!(
            answer.ends_with("\r\n\r\n{\"state\":\"paused\"}"),
            "{answer}"
        );
        drop(api);
        assert!(!path.exists());
    }

    #[test]
    fn a_socket_left_by_a_killed_run_is_taken_over_and_a_living_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("api");
        drop(UnixListener::bind(&path).unwrap());

        let api = listen(&path).unwrap();
        let second = listen(&path).unwrap_err();

        assert!(second.to_string().contains("another machine"), "{second}");
        drop(api);
        fs::write(&path, "mine").unwrap();
        assert!(listen(&path).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"mine");
    }

    #[test]
    fn a_socket_that_somebody_else_has_put_there_since_stays() {
        let folder = tempfile::tempdir().unwrap();
        let (path, moved) = (folder.path().join("api"), folder.path().join("moved"));
        let first = listen(&path).unwrap();
        fs::rename(&path, &moved).unwrap();
        let second = listen(&path).unwrap();

        drop(first);

        assert!(path.exists());
        drop(second);
        assert!(!path.exists());
        drop(Bound::new(&path).unwrap());
        assert!(!path.exists());
    }

    #[test]
    fn a_request_is_read_whole_and_no_more_than_is_allowed() {
        let head = "POST /v1/stop HTTP/1.1\r\nContent-Length: 4\r\n\r\n";
        let whole = format!("{head}{{}}\r\n");

        for end in 0..whole.len() {
            assert_eq!(parse(&whole.as_bytes()[..end]), Parsed::Part, "{end}");
        }
        assert_eq!(parse(whole.as_bytes()), Parsed::Whole(Request::Stop));
        let large = format!("GET /v1/state HTTP/1.1\r\nx: {}", "y".repeat(LARGEST));
        assert!(matches!(parse(large.as_bytes()), Parsed::Refused((413, _))));
        let body = "GET /v1/state HTTP/1.1\r\nContent-Length: 18446744073709551615\r\n\r\n";
        assert!(matches!(parse(body.as_bytes()), Parsed::Refused((413, _))));
    }

    #[test]
    fn a_wrong_path_or_method_is_told_what_is_right() {
        for (request, status) in [
            ("GET /v2/state HTTP/1.1\r\n\r\n", 404),
            ("GET /v1/pause HTTP/1.1\r\n\r\n", 405),
            (
                "POST /v1/state HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
                400,
            ),
            ("POST /v1/stop HTTP/1.1\r\nContent-Length: x\r\n\r\n", 400),
            ("\x7f\r\n\r\n", 400),
        ] {
            let parsed = parse(request.as_bytes());
            assert!(
                matches!(parsed, Parsed::Refused((given, _)) if given == status),
                "{request}: {parsed:?}"
            );
        }
    }

    proptest! {
        #[test]
        fn no_request_does_harm(bytes in prop::collection::vec(any::<u8>(), 0..9000)) {
            let _ = parse(&bytes);
        }
    }
}
