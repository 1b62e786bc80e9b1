//! Spans of requests for an OpenTelemetry collector: OTLP in JSON over HTTP without TLS.
//!
//! A request is one span, with its endpoint and id; its end is an event of the span, with the
//! tokens and times that the log has. The collector beside the server forwards them.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use anyhow::{Context, bail};
use opentelemetry::trace::TracerProvider;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::resource::EnvResourceDetector;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing::Subscriber;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::registry::LookupSpan;
use ureq::Agent;

/// Longest wait for the collector, per batch of spans.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The path of spans below a collector's address.
const PATH: &str = "/v1/traces";

/// A collector that gets the spans of requests. Dropping it sends those that wait.
#[derive(Debug)]
pub(super) struct RequestSpans(SdkTracerProvider);

impl RequestSpans {
    /// Spans for the collector at `endpoint`, such as `http://localhost:4318`. Nothing is sent yet.
    ///
    /// # Errors
    /// An address that is not plain HTTP.
    pub(super) fn to_collector(endpoint: &str) -> anyhow::Result<RequestSpans> {
        if !endpoint.starts_with("http://") {
            bail!(
                "--otlp-endpoint {endpoint}: use the address of a collector on this machine or \
                 network, such as http://localhost:4318; it can forward spans over TLS"
            );
        }
        let agent = Agent::config_builder()
            .timeout_global(Some(TIMEOUT))
            .http_status_as_error(false)
            .build();
        let exporter = SpanExporter::builder()
            .with_http()
            .with_protocol(Protocol::HttpJson)
            .with_endpoint(format!("{}{PATH}", endpoint.trim_end_matches('/')))
            .with_http_client(AgentClient(agent.into()))
            .build()
            .with_context(|| format!("--otlp-endpoint {endpoint}"))?;
        // The detector reads `OTEL_RESOURCE_ATTRIBUTES`, which may have another `service.name`.
        let resource = Resource::builder_empty()
            .with_service_name("hearth")
            .with_detector(Box::new(EnvResourceDetector::new()));
        let provider = SdkTracerProvider::builder()
            .with_resource(resource.build())
            .with_batch_exporter(exporter)
            .build();
        Ok(RequestSpans(provider))
    }

    /// What feeds it, whatever the log's filter is.
    pub(super) fn layer<S>(&self) -> impl Layer<S> + use<S>
    where
        S: Subscriber + for<'a> LookupSpan<'a>,
    {
        tracing_opentelemetry::layer()
            .with_tracer(self.0.tracer("hearth"))
            .with_location(false)
            .with_threads(false)
            .with_filter(Targets::new().with_target("server", LevelFilter::INFO))
    }
}

impl Drop for RequestSpans {
    fn drop(&mut self) {
        if let Err(error) = self.0.shutdown() {
            tracing::warn!("the last spans did not reach the collector: {error}");
        }
    }
}

/// Called on the exporter's own thread, which may wait.
#[derive(Debug)]
struct AgentClient(Agent);

impl AgentClient {
    fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (head, body) = request.into_parts();
        let response = self.0.run(Request::from_parts(head, body.to_vec()))?;
        let (head, mut body) = response.into_parts();
        Ok(Response::from_parts(head, body.read_to_vec()?.into()))
    }
}

impl HttpClient for AgentClient {
    fn send_bytes<'a, 'b>(
        &'a self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(std::future::ready(self.send(request)))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    #[test]
    fn a_request_is_a_span_at_the_collector() {
        let collector = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = collector.local_addr().unwrap();
        let received = std::thread::spawn(move || {
            let (mut stream, _) = collector.accept().unwrap();
            let (mut text, mut part) = (String::new(), [0; 4096]);
            let whole = |text: &str| {
                let (head, body) = text.split_once("\r\n\r\n")?;
                let length = head.lines().find_map(|line| {
                    let (name, value) = line.split_once(':')?;
                    let is_length = name.eq_ignore_ascii_case("content-length");
                    is_length.then(|| value.trim().parse::<usize>().unwrap())
                })?;
                (body.len() >= length).then_some(())
            };
            while whole(&text).is_none() {
                let n = stream.read(&mut part).unwrap();
                assert_ne!(n, 0, "{text}");
                text += std::str::from_utf8(&part[..n]).unwrap();
            }
            let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}";
            stream.write_all(answer).unwrap();
            text
        });
        let spans = RequestSpans::to_collector(&format!("http://{address}/")).unwrap();
        let subscriber = tracing_subscriber::registry().with(spans.layer());
        tracing::subscriber::with_default(subscriber, || {
            let span = tracing::info_span!("request", id = "r-17", endpoint = "/v1/chat");
            let _entered = span.enter();
            tracing::info!(completion_tokens = 42, "request finished");
            tracing::debug!("not for the collector");
        });
        drop(spans);
        let text = received.join().unwrap();
        assert!(text.starts_with("POST /v1/traces HTTP/1.1\r\n"), "{text}");
        for part in ["request finished", "r-17", "completion_tokens", "hearth"] {
            assert!(text.contains(part), "{part} is missing from {text}");
        }
        assert!(!text.contains("not for the collector"), "{text}");
    }

    #[test]
    fn an_address_with_tls_is_refused_by_name() {
        let error = RequestSpans::to_collector("https://collector").unwrap_err();
        assert!(
            error
                .to_string()
                .contains("--otlp-endpoint https://collector")
        );
    }
}
