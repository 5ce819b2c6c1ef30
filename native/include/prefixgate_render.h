/* Chat templates of prefixgate's native library. Every function may be called from any thread; panics inside come back as
 * errors. Error texts are freed with tokenizers_free_string and never quote what was rendered. */
#ifndef PREFIXGATE_RENDER_H
#define PREFIXGATE_RENDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct prefixgate_template prefixgate_template;
typedef struct prefixgate_rendered prefixgate_rendered;

/* Statuses of a render. */
enum {
    PREFIXGATE_RENDER_OK = 0,
    PREFIXGATE_RENDER_REFUSED = 1,     /* by the template */
    PREFIXGATE_RENDER_FAILED = 2,      /* the template failed */
    PREFIXGATE_RENDER_UNSUPPORTED = 3, /* vLLM may render it, this library cannot */
    PREFIXGATE_RENDER_INVALID = 4,     /* vLLM refuses the request before the template */
    PREFIXGATE_RENDER_LIMIT = 5,       /* fuel, time or output ran out */
    PREFIXGATE_RENDER_PANICKED = 6
};

typedef struct {
    size_t len;             /* bytes of text */
    int32_t status;
    int32_t content_format; /* 0: the template takes texts, 1: lists of parts */
    uint32_t media;         /* images, audio and video in the messages */
    uint32_t uses_clock;    /* the template may print the time */
} prefixgate_render_outcome;

typedef struct {
    uint32_t message; /* index of the message */
    uint32_t part;    /* index of the part in its content */
    uint32_t kind;    /* 0: image, 1: audio, 2: video */
    uint32_t placed;  /* whether start and end are known */
    size_t start;     /* what the template printed for it, in bytes of the text */
    size_t end;
} prefixgate_render_place;

/* Compiles the templates of a JSON configuration (Config in src/render/mod.rs). Null and *error on failure. */
prefixgate_template *prefixgate_template_new(const uint8_t *config, size_t len, char **error);

/* Frees a template that no call uses any more. */
void prefixgate_template_free(prefixgate_template *tmpl);

/* The content format of the template for requests without tools. */
int32_t prefixgate_template_format(const prefixgate_template *tmpl);

/* Renders a request given by its parts as JSON (a length of 0: absent), or with context set the variables in messages as
 * they are. Bits of flags: 0 add_generation_prompt is given, 1 its value, 2 continue_final_message is given, 3 its value.
 * unix_seconds, micro and offset are the time and its zone's seconds east of UTC.
 * The text is written to dst if it fits into dst_cap and the request has no media; else *spill is set and must be given to
 * prefixgate_template_take. On failure *error is set. */
void prefixgate_template_render(const prefixgate_template *tmpl, bool context, const uint8_t *messages, size_t messages_len,
                                const uint8_t *tools, size_t tools_len, const uint8_t *documents, size_t documents_len,
                                const uint8_t *kwargs, size_t kwargs_len, const uint8_t *effort, size_t effort_len,
                                uint32_t flags, int64_t unix_seconds, uint32_t micro, int32_t offset, uint8_t *dst, size_t dst_cap,
                                prefixgate_render_outcome *outcome, prefixgate_rendered **spill, char **error);

/* Copies a spilled text to dst and its media to places, which have room for what the outcome counted, and frees it. A
 * null dst only frees. */
void prefixgate_template_take(prefixgate_rendered *spill, uint8_t *dst, prefixgate_render_place *places);

#endif
