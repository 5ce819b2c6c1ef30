package gateway

import (
	"crypto/subtle"
	"errors"
	"fmt"
	"net/http"
	"runtime/debug"
	"strings"

	"prefixgate/internal/openai"

	"github.com/gin-gonic/gin"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// newEngine returns a gin engine that logs nothing, redirects nothing and trusts no proxy.
func (g *Gateway) newEngine() *gin.Engine {
	e := gin.New()
	e.RedirectTrailingSlash = false
	e.RedirectFixedPath = false
	e.HandleMethodNotAllowed = true
	e.ForwardedByClientIP = false
	e.UseRawPath = true // a path is what was sent: no handler is reached through an escaped spelling
	e.UnescapePathValues = true
	e.Use(g.recover)
	e.NoMethod(func(c *gin.Context) {
		// gin has set Allow.
		g.refuseLocal(c.Writer, c.Request, methodNotAllowed(c.Request.Method))
	})
	return e
}

// publicHandler serves clients.
func (g *Gateway) publicHandler() http.Handler {
	e := g.newEngine()
	e.POST("/v1/chat/completions", g.limited(func(w http.ResponseWriter, r *http.Request) { g.complete(w, r, openai.Chat) }))
	e.POST("/v1/completions", g.limited(func(w http.ResponseWriter, r *http.Request) { g.complete(w, r, openai.Completions) }))
	for _, method := range []string{http.MethodGet, http.MethodHead} {
		e.Handle(method, "/v1/models", func(c *gin.Context) { g.listModels(c.Writer, c.Request) })
		e.Handle(method, "/v1/models/*id", func(c *gin.Context) { g.oneModel(c.Writer, c.Request) })
	}
	for _, path := range []string{"/v1/models", "/v1/models/*id", "/v1/chat/completions", "/v1/completions"} {
		allow := "GET, HEAD, OPTIONS"
		if strings.HasSuffix(path, "completions") {
			allow = "POST, OPTIONS"
		}
		e.OPTIONS(path, func(c *gin.Context) { g.options(c.Writer, c.Request, allow) })
	}
	g.healthRoutes(e)
	if g.server.AdminListen == "" {
		g.adminRoutes(e)
	}
	if g.server.Explain.Enabled && g.server.Explain.TokenFile != "" {
		e.POST("/v1/explain", func(c *gin.Context) { g.explainGuarded(c.Writer, c.Request) })
	}
	pass := g.limited(g.pass)
	e.NoRoute(func(c *gin.Context) {
		// gin has put 404 on the writer; whoever answers sets the status.
		c.Status(http.StatusOK)
		if g.paths.class(c.Request.URL) == pathForwarded {
			pass(c)
			return
		}
		x := g.begin(c.Writer, c.Request, openai.Other)
		defer x.end()
		x.refuse(openai.NotFound(), outcomeRejected)
	})
	return e
}

// adminHandler serves operators, where they have a listener of their own.
func (g *Gateway) adminHandler() http.Handler {
	e := g.newEngine()
	g.healthRoutes(e)
	g.adminRoutes(e)
	if g.server.Explain.Enabled {
		e.POST("/v1/explain", func(c *gin.Context) { g.explainGuarded(c.Writer, c.Request) })
	}
	e.NoRoute(func(c *gin.Context) { g.refuseLocal(c.Writer, c.Request, openai.NotFound()) })
	return e
}

func (g *Gateway) healthRoutes(e *gin.Engine) {
	for _, method := range []string{http.MethodGet, http.MethodHead} {
		e.Handle(method, "/livez", func(c *gin.Context) { plain(c.Writer, http.StatusOK, "ok\n") })
		e.Handle(method, "/readyz", func(c *gin.Context) { g.readyz(c.Writer) })
	}
}

func (g *Gateway) adminRoutes(e *gin.Engine) {
	metrics := promhttp.HandlerFor(g.gatherer, promhttp.HandlerOpts{ErrorLog: nil, ErrorHandling: promhttp.ContinueOnError})
	e.GET("/metrics", gin.WrapH(metrics))
}

// limited serves requests up to the number that may be under way, and refuses those beyond.
func (g *Gateway) limited(serve http.HandlerFunc) gin.HandlerFunc {
	return func(c *gin.Context) {
		defer g.underWay.Add(-1)
		if n := g.underWay.Add(1); g.server.MaxInFlight > 0 && n > int64(g.server.MaxInFlight) {
			x := g.begin(c.Writer, c.Request, openai.EndpointOf(c.Request.URL.Path))
			defer x.end()
			x.refuse(openai.Overloaded(g.retryAfter), outcomeOverloaded)
			return
		}
		serve(c.Writer, c.Request)
	}
}

// recover ends a request whose handler panicked. A broken stream (http.ErrAbortHandler) goes on to the server, which then
// breaks the client's connection: to swallow it, as gin's own recovery does, would make the stream look complete.
func (g *Gateway) recover(c *gin.Context) {
	defer func() {
		v := recover()
		if v == nil {
			return
		}
		if err, ok := v.(error); ok && errors.Is(err, http.ErrAbortHandler) {
			panic(http.ErrAbortHandler)
		}
		g.caught(v)
		if c.Writer.Written() {
			panic(http.ErrAbortHandler)
		}
		g.refuseLocal(c.Writer, c.Request, openai.Internal())
		c.Abort()
	}()
	c.Next()
}

// caught accounts for a panic. Its value may hold a part of a request, so only its type is logged.
func (g *Gateway) caught(v any) {
	g.metrics.panics.Inc()
	g.log.Error("panic", "type", fmt.Sprintf("%T", v), "stack", string(debug.Stack()))
}

// readyz answers from what is known; it asks nobody.
func (g *Gateway) readyz(w http.ResponseWriter) {
	if why := g.notReady(); why != "" {
		plain(w, http.StatusServiceUnavailable, why+"\n")
		return
	}
	plain(w, http.StatusOK, "ok\n")
}

func plain(w http.ResponseWriter, status int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write([]byte(text)) // the server reports a dead client itself
}

// options answers a browser's preflight, and anyone who asks what a path takes.
func (g *Gateway) options(w http.ResponseWriter, r *http.Request, allow string) {
	if r.Header.Get("Access-Control-Request-Method") != "" && r.Header.Get("Origin") != "" {
		g.pass(w, r) // whether other origins are welcome is for the engine to say
		return
	}
	w.Header().Set("Allow", allow)
	w.WriteHeader(http.StatusNoContent)
}

func methodNotAllowed(method string) error {
	return &openai.Error{
		Status: http.StatusMethodNotAllowed, Type: openai.TypeInvalidRequest, Code: "method_not_allowed",
		Message: "this path does not take " + method[:min(len(method), 20)],
	}
}

// authorized says whether a request presents the bearer token.
func authorized(r *http.Request, token string) bool {
	got, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	return ok && subtle.ConstantTimeCompare([]byte(got), []byte(token)) == 1
}
